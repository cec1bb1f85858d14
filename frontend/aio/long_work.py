"""Does long work on the event loop without keeping it from anything else.

A body may take seconds to parse. In a thread that would not help: threads share the interpreter's
lock, and each turn of the loop would wait for it. So such work is written as a generator that
yields after each small step, and is done in slices between which the loop sees to everybody else.
"""

import asyncio
import contextlib
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

#: Work in small steps; what it returns is its result.
Steps = Generator[None, None, T]

#: Seconds; what is done sooner is not interrupted, and a step should take less.
_SLICE = 0.002


class LongWork:
    """Takes turns between all pieces of long work: each turn of the loop has one slice of one."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # is fair: whoever waits longest is next

    async def run(self, steps: Steps[T]) -> T:
        """Do the work to its end, and return its result; raises what it raises."""
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
    """Go on for a while; raises StopIteration, with the result, at the end."""
    end = time.perf_counter() + _SLICE
    while time.perf_counter() < end:
        next(steps)
