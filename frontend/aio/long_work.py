"""Run long work on the event loop in slices, between which the loop serves other tasks.

A body may take seconds to parse. A thread would not help, because the event loop would wait for the
interpreter's lock in each turn. Such work is a generator that yields after each small step.
"""

import asyncio
import contextlib
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

#: Work in small steps; it returns its result.
Steps = Generator[None, None, T]

#: Seconds; shorter work is not interrupted, and a step should take less.
_SLICE = 0.002


class LongWork:
    """Runs pieces of long work in turn: one slice of one piece in each turn of the loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # first come, first served

    async def run(self, steps: Steps[T]) -> T:
        """Return the result of the work, or raise its exception."""
        with contextlib.closing(steps):
            try:
                _run_slice(steps)
                while True:
                    async with self._turn:
                        await asyncio.sleep(0)
                        _run_slice(steps)
            except StopIteration as finished:
                result: T = finished.value
                return result


def _run_slice(steps: Steps[T]) -> None:
    """Run some steps; raises StopIteration, with the result, at the end."""
    end = time.perf_counter() + _SLICE
    while time.perf_counter() < end:
        next(steps)
