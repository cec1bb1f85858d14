"""torch.compile, as the section ``pt2`` of model-config.yaml configures it.

    pt2: {compile: {enable: true, backend: inductor, mode: reduce-overhead}}    # the current form
    pt2: {export: {aot_compile: true}}                                          # compiled before
    pt2: inductor                                                               # older forms
    pt2: {backend: inductor, mode: reduce-overhead}

A model that cannot be compiled is served uncompiled, with a warning.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from marserve.handlers.performance.compilation import Compilation, UnforeseenShapes, compiled_graphs
from marserve.handlers.utils import check_valid_pt2_backend

logger = logging.getLogger(__name__)


def compile_arguments(pt2: Any) -> dict[str, Any] | None:
    """Return torch.compile's arguments from a ``pt2`` section; None if it is not to be used.

    Raises:
        ValueError: The section is neither a string nor a mapping.
    """
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


def compilation_of(arguments: dict[str, Any]) -> Compilation:
    """Return an empty description of a compilation with these arguments of torch.compile."""
    by = {
        "by": "torch.compile",
        "backend": str(arguments.get("backend", "inductor")),
        "mode": str(arguments.get("mode") or "default"),
        **({"dynamic": arguments["dynamic"]} if "dynamic" in arguments else {}),
    }
    return Compilation(by, compiled_graphs)


def try_to_compile(model: Any, arguments: dict[str, Any]) -> Any:
    """Compile a model; None if torch refuses. Most failures come with the first call."""
    if not check_valid_pt2_backend(arguments.get("backend", "inductor")):
        return None
    try:
        compiled = torch.compile(model, **arguments)
    except Exception:  # backends raise anything
        logger.warning("torch.compile failed; the model is served uncompiled.", exc_info=True)
        return None
    # TorchServe's line, which scripts search for.
    logger.info("Compiled model with %s", ", ".join(f"{key} {arguments[key]}" for key in arguments))
    return compiled


class CompiledForward:
    """A compiled function, or the original while it is not ``is_on``."""

    def __init__(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self.is_on = True
        self.shapes: UnforeseenShapes | None = None  # collects calls
        self._plain = plain
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if self.shapes is not None:
            self.shapes.add((args, kwargs))
        return (self._compiled if self.is_on else self._plain)(*args, **kwargs)

    def end_warm_up(self) -> None:
        """Run new shapes uncompiled in this process, because compiling would take up to a minute.

        torch before 2.6 has no such switch.
        """
        set_stance = getattr(torch.compiler, "set_stance", None)
        if set_stance is None:
            self.shapes = None
            return
        set_stance("eager_on_recompile")
        if self.shapes is not None:
            self.shapes.end_warm_up()


def compile_model(model: Any, pt2: Any) -> Any:
    """Compile a model as its ``pt2`` section says; None if it does not, or torch refuses."""
    arguments = compile_arguments(pt2)
    return None if arguments is None else try_to_compile(model, arguments)
