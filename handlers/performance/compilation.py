"""What of a model was compiled, or recorded as CUDA graphs, before the first request; for describe.

{"by": "torch.compile", "backend": "inductor", "mode": "default",
 "sizes": [{"size": 1, "seconds": 8.1, "graphs": 1}, {"size": 4, "seconds": 6.3, "graphs": 1}],
 "graphBreaks": {}, "otherSizes": "filled up to these", "fallback": None, "unforeseen": {}}
"""

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from marserve.handlers.performance.trees import tensors_of

logger = logging.getLogger(__name__)

_MAX_REASONS = 10
_MAX_REASON = 200  # characters: the first line of torch's says it
_MAX_SHAPES = 20


class Compilation:
    """Collects what is told of it; `described` puts it in JSON values.

    Args:
        by: Who compiles, and how, by the names that the description has.
        count: How many graphs there are so far, of whatever size.
    """

    def __init__(self, by: Mapping[str, Any], count: Callable[[], int]) -> None:
        self.other_sizes = ""  # what becomes of those that were not run
        self.fallback: str | None = None  # why the model is not as was asked for
        self.unforeseen = UnforeseenShapes()
        self._by = dict(by)
        self._count = count
        self._counted = count()
        self._breaks = graph_breaks()
        self._sizes: list[dict[str, Any]] = []

    def add(self, size: int, seconds: float) -> None:
        """Note that a batch of this size was run for the first time, and how long it took."""
        before, self._counted = self._counted, self._count()
        graphs = self._counted - before
        self._sizes.append({"size": size, "seconds": round(seconds, 3), "graphs": graphs})

    def described(self) -> dict[str, Any]:
        """What is known by now."""
        breaks = (graph_breaks() - self._breaks).most_common(_MAX_REASONS)
        return {
            **self._by,
            "sizes": self._sizes,
            "graphBreaks": {reason.strip()[:_MAX_REASON]: count for reason, count in breaks},
            "otherSizes": self.other_sizes,
            "fallback": self.fallback,
            "unforeseen": dict(self.unforeseen.batches),
        }


class UnforeseenShapes:
    """Which shapes come in traffic that did not come in the warm-up."""

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter()  # by shape, the first so many
        self._foreseen: set[tuple[Any, ...]] = set()
        self._is_warming_up = True

    def end_warm_up(self) -> None:
        """Count what is new from now on."""
        self._is_warming_up = False

    def look_at(self, call: tuple[Any, Any]) -> None:
        """See what a function is called with."""
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(call))
        if self._is_warming_up:
            self._foreseen.add(key)
        elif key not in self._foreseen:
            text = ", ".join(str(list(shape)) for shape, _ in key)
            if text not in self.batches and len(self.batches) < _MAX_SHAPES:
                logger.warning("A batch of shape %s runs uncompiled: nothing was prepared.", text)
                self.batches[text] = 0
            if text in self.batches:
                self.batches[text] += 1


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    return int(_counters("stats")["unique_graphs"])


def graph_breaks() -> Counter[str]:
    """Why torch.compile began a new graph in the middle of a function, and how often."""
    return Counter(_counters("graph_break"))


def _counters(kind: str) -> Counter[str]:
    # torch has no other way to ask; one that has not got it is told as nothing.
    utils = importlib.import_module("torch._dynamo.utils")
    counters: Mapping[str, Counter[str]] = getattr(utils, "counters", {})
    return Counter(counters.get(kind, {}))


def compile_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What torch.compile was called with, as the description has it."""
    return {
        "by": "torch.compile",
        "backend": str(arguments.get("backend", "inductor")),
        "mode": str(arguments.get("mode") or "default"),
        **({"dynamic": arguments["dynamic"]} if "dynamic" in arguments else {}),
    }
