"""What was compiled, or recorded as CUDA graphs, before the first request, for describe.

{"by": "torch.compile", "backend": "inductor", "mode": "default",
 "sizes": [{"size": 1, "seconds": 8.1, "graphs": 1}, {"size": 4, "seconds": 6.3, "graphs": 1}],
 "graphBreaks": {}, "otherSizes": "filled up to these", "fallback": None, "unforeseen": {}}
"""

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

_MAX_REASONS = 10
_MAX_REASON = 200  # characters: the first line of torch's reason


class Compilation:
    """What compiles, with its options (``by``), and findings; ``count()`` returns the graphs."""

    def __init__(self, by: Mapping[str, Any], count: Callable[[], int]) -> None:
        self.other_sizes = ""  # how batches of other sizes run
        self.fallback: str | None = None  # why the model is not compiled as configured
        self.unforeseen: Counter[str] = Counter()  # batches that run uncompiled, by shape
        self._by = dict(by)
        self._count = count
        self._counted = count()
        self._breaks = _counters("graph_break")
        self._sizes: list[dict[str, Any]] = []

    def add(self, size: int, seconds: float) -> None:
        """Add the first run of a batch size and its duration."""
        logger.info("Batch size %d: first run %.1f s", size, seconds)
        before, self._counted = self._counted, self._count()
        graphs = self._counted - before
        self._sizes.append({"size": size, "seconds": round(seconds, 3), "graphs": graphs})

    def described(self) -> dict[str, Any]:
        """Return the current figures as JSON values."""
        breaks = (_counters("graph_break") - self._breaks).most_common(_MAX_REASONS)
        return {
            **self._by,
            "sizes": self._sizes,
            "graphBreaks": {reason.strip()[:_MAX_REASON]: count for reason, count in breaks},
            "otherSizes": self.other_sizes,
            "fallback": self.fallback,
            "unforeseen": dict(self.unforeseen),
        }


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    return int(_counters("stats")["unique_graphs"])


def _counters(kind: str) -> Counter[str]:
    # torch has no public interface for these; empty if a release lacks them.
    utils = importlib.import_module("torch._dynamo.utils")
    counters: Mapping[str, Counter[str]] = getattr(utils, "counters", {})
    return Counter(counters.get(kind, {}))
