"""Runs work that is written in steps (`marserve.frontend.aio.long_work`) without an event loop."""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from marserve.frontend.telemetry.exposition import render
from marserve.frontend.telemetry.series import Registry

T = TypeVar("T")


def result_of(
    steps: Generator[int, None, T], hold: Callable[[int], object] = lambda _count: None
) -> T:
    """Do the work to its end; ``hold`` gets the bytes that the steps add to memory."""
    try:
        while True:
            hold(next(steps))
    except StopIteration as stop:
        result: T = stop.value
        return result


def page_of(registry: Registry, *arguments: Any) -> str:
    """Return the page of metrics."""
    return result_of(render(registry, *arguments)).decode()
