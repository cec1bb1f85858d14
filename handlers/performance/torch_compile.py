"""torch.compile, as the section ``pt2`` of model-config.yaml configures it.

    pt2: {compile: {enable: true, backend: inductor, mode: reduce-overhead}}    # the current form
    pt2: {export: {aot_compile: true}}                                          # compiled before
    pt2: inductor                                                               # older forms
    pt2: {backend: inductor, mode: reduce-overhead}

A model that cannot be compiled is served uncompiled, with a warning.
"""

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from marserve.backend.errors import sentence_of
from marserve.handlers.performance.trees import tensors_of
from marserve.handlers.utils import check_valid_pt2_backend

logger = logging.getLogger(__name__)

_MAX_REASONS = 10
_MAX_REASON = 200  # characters: the first line of torch's reason
_MAX_SHAPES = 20


def compile_arguments(pt2: Any) -> dict[str, Any] | None:
    """Return torch.compile's arguments from a ``pt2`` section; None if it is not to be used."""
    if not pt2:
        return None
    if isinstance(pt2, str):
        pt2 = {"backend": pt2}
    if not isinstance(pt2, dict):
        raise ValueError("pt2 should be str or dict")  # noqa: TRY004 - a value in the user's file
    if "compile" in pt2:
        arguments = dict(pt2["compile"] or {})
        return arguments if arguments.pop("enable", True) else None
    if "export" in pt2:
        return None
    logger.warning(
        "This form of pt2 in model-config.yaml is deprecated; write it as pt2: {compile: {…}}"
    )
    return dict(pt2)


class Compilation:
    """What was compiled, or recorded as CUDA graphs, before the first request, for describe.

    ``by`` is what compiles, with its options; ``count()`` returns the number of graphs.
    """

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


def _compiled_graphs() -> int:
    return int(_counters("stats")["unique_graphs"])


def _counters(kind: str) -> Counter[str]:
    # torch has no public interface for these; empty if a release lacks them.
    utils = importlib.import_module("torch._dynamo.utils")
    counters: Mapping[str, Counter[str]] = getattr(utils, "counters", {})
    return Counter(counters.get(kind, {}))


def compilation_of(arguments: dict[str, Any]) -> Compilation:
    """Return an empty description of a compilation with these arguments of torch.compile."""
    by = {
        "by": "torch.compile",
        "backend": str(arguments.get("backend", "inductor")),
        "mode": str(arguments.get("mode") or "default"),
        **({"dynamic": arguments["dynamic"]} if "dynamic" in arguments else {}),
    }
    return Compilation(by, _compiled_graphs)


def try_to_compile(model: Any, arguments: dict[str, Any], load_warnings: list[str]) -> Any:
    """Compile a model; None, with a warning, if torch refuses. Most fail at the first call."""
    backend = str(arguments.get("backend", "inductor"))[:_MAX_REASON]
    if not check_valid_pt2_backend(backend):
        load_warnings.append(f"pt2: served uncompiled: {backend!r} is not a supported backend.")
        return None
    try:
        compiled = torch.compile(model, **arguments)
    except Exception as error:  # backends raise anything
        logger.warning("torch.compile failed; the model is served uncompiled.", exc_info=True)
        load_warnings.append(f"pt2: served uncompiled: torch.compile failed: {sentence_of(error)}")
        return None
    # TorchServe's line, which scripts search for.
    logger.info("Compiled model with %s", ", ".join(f"{key} {arguments[key]}" for key in arguments))
    return compiled


class CompiledForward:
    """A compiled function, or the original while it is not ``is_on``.

    ``unforeseen`` counts calls after the warm-up, by shape, if the shape is not among `foreseen`.
    """

    def __init__(
        self, plain: Callable[..., Any], compiled: Callable[..., Any], unforeseen: Counter[str]
    ) -> None:
        self.is_on = True
        self.foreseen: set[Any] | None = None  # shapes of the warm-up; None: not collected
        self._is_warming_up = True
        self._plain = plain
        self._compiled = compiled
        self._unforeseen = unforeseen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if self.foreseen is not None:
            shapes = tuple((each.shape, each.dtype) for each in tensors_of((args, kwargs)))
            if self._is_warming_up:
                self.foreseen.add(shapes)
            elif shapes not in self.foreseen:
                self._count(", ".join(str(list(shape)) for shape, _ in shapes))
        return (self._compiled if self.is_on else self._plain)(*args, **kwargs)

    def end_warm_up(self) -> None:
        """Run new shapes uncompiled in this process, because compiling would take up to a minute.

        torch before 2.6 has no such switch.
        """
        self._is_warming_up = False
        set_stance = getattr(torch.compiler, "set_stance", None)
        if set_stance is None:
            self.foreseen = None
        else:
            set_stance("eager_on_recompile")

    def _count(self, shapes: str) -> None:
        if shapes in self._unforeseen or len(self._unforeseen) < _MAX_SHAPES:
            if shapes not in self._unforeseen:
                logger.warning("A batch of shape %s runs uncompiled: nothing was prepared.", shapes)
            self._unforeseen[shapes] += 1


def load_warnings_of(context: Any) -> list[str]:
    """Return `Context.load_warnings`, which copies of MockContext do not have."""
    found: list[str] = getattr(context, "load_warnings", [])
    return found


def compile_model(model: Any, pt2: Any, load_warnings: list[str]) -> Any:
    """Compile a model as its ``pt2`` section says; None if it does not, or torch refuses."""
    arguments = compile_arguments(pt2)
    return None if arguments is None else try_to_compile(model, arguments, load_warnings)
