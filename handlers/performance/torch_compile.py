"""torch.compile, as the ``pt2`` section of model-config.yaml asks for it.

    pt2: {compile: {enable: true, backend: inductor, mode: reduce-overhead}}    # the current form
    pt2: {export: {aot_compile: true}}                                          # compiled before
    pt2: inductor                                                               # older forms
    pt2: {backend: inductor, mode: reduce-overhead}

What cannot be compiled is served as it is, with a warning: a slower model is better than none.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from marserve.handlers.performance.compilation import UnforeseenShapes
from marserve.handlers.utils import check_valid_pt2_backend

logger = logging.getLogger(__name__)


def compile_arguments(pt2: Any) -> dict[str, Any] | None:
    """Read what a ``pt2`` section asks torch.compile for: its arguments, or None for nothing.

    A ``compile`` section that does not say ``enable`` was written to be used.

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


def try_to_compile(model: Any, arguments: dict[str, Any]) -> Any:
    """Compile a model or a function; None if torch cannot.

    Nothing but the arguments is looked at here: what fails is mostly the first call.
    """
    if not check_valid_pt2_backend(arguments.get("backend", "inductor")):
        return None
    try:
        compiled = torch.compile(model, **arguments)
    except Exception:  # any backend's own failure; the model works without it
        logger.warning("torch.compile failed; the model is served uncompiled.", exc_info=True)
        return None
    # TorchServe's line, which people's scripts look for.
    logger.info("Compiled model with %s", ", ".join(f"{key} {arguments[key]}" for key in arguments))
    return compiled


class CompiledForward:
    """A function that torch.compile has, and that can be had without it."""

    def __init__(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self._plain = plain
        self._run = compiled
        self._unforeseen: UnforeseenShapes | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, compiled or not."""
        if self._unforeseen is not None:
            self._unforeseen.look_at((args, kwargs))
        return self._run(*args, **kwargs)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Run the function itself during a ``with`` block."""
        run, self._run = self._run, self._plain
        try:
            yield
        finally:
            self._run = run

    def give_up(self) -> None:
        """Run the function itself from now on."""
        self._run = self._plain

    @contextmanager
    def foreseen(self, unforeseen: UnforeseenShapes) -> Iterator[None]:
        """Note the shapes that come during a ``with`` block."""
        self._unforeseen = unforeseen
        try:
            yield
        finally:
            self._unforeseen = None

    def end_warm_up(self, unforeseen: UnforeseenShapes) -> None:
        """Compile nothing more in this process: what has another shape runs as it is.

        A shape that nobody foresaw is then slow, where compiling it would hold up everybody for a
        minute. torch before 2.6 has no such switch.
        """
        set_stance = getattr(torch.compiler, "set_stance", None)
        if set_stance is not None:
            set_stance("eager_on_recompile")
            unforeseen.end_warm_up()
            self._unforeseen = unforeseen


def compile_model(model: Any, pt2: Any) -> Any:
    """Compile a model; None where its ``pt2`` section does not ask for it, or torch cannot."""
    arguments = compile_arguments(pt2)
    return None if arguments is None else try_to_compile(model, arguments)
