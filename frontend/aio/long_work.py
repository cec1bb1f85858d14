"""Run long work on the event loop in slices, between which the loop serves other tasks.

A body may take seconds to parse. A thread would not help, because the event loop would wait for the
interpreter's lock in each turn. Such work is a generator that yields after each small step.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from marserve.backend.protocol import Buffer

T = TypeVar("T")

#: Work in small steps, which returns its result. Each step yields the bytes that it has added to
#: memory, of those that stay until the result is used; 0 for none.
Steps = Generator[int, None, T]

# Bytes that one step copies: 0.1 ms, or more where the kernel has to clear pages.
_COPIED_BYTES = 1 << 19
#: Seconds; shorter work is not interrupted, and a step should take less.
_SLICE = 0.002


def _uncounted(_bytes: int) -> None:
    pass


class LongWork:
    """Runs pieces of long work: in each turn of the loop one slice, and first slices of new pieces.

    So short work does not wait for long work.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # first come, first served
        self._spent = 0.0  # seconds of first slices in this turn of the loop

    async def run(self, steps: Steps[T], hold: Callable[[int], object] = _uncounted) -> T:
        """Return the result of the work, or raise its exception.

        ``hold`` is called with the bytes that the steps yield, and may raise to end the work.
        """
        with contextlib.closing(steps):
            try:
                while self._spent >= _SLICE:  # noqa: ASYNC110 - until the next turn
                    await asyncio.sleep(0)
                self._begin(steps, hold)
                while True:
                    async with self._turn:
                        await asyncio.sleep(0)
                        _run_slice(steps, hold)
            except StopIteration as finished:
                result: T = finished.value
                return result

    def _begin(self, steps: Steps[T], hold: Callable[[int], object]) -> None:
        """Run the first slice."""
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._end_turn)
        began = time.perf_counter()
        try:
            _run_slice(steps, hold)
        finally:
            self._spent += time.perf_counter() - began

    def _end_turn(self) -> None:
        self._spent = 0.0


def _run_slice(steps: Steps[T], hold: Callable[[int], object]) -> None:
    """Run some steps; raises StopIteration, with the result, at the end."""
    end = time.perf_counter() + _SLICE
    while time.perf_counter() < end:
        if count := next(steps):
            hold(count)


def joined(pieces: Sequence[Buffer]) -> Steps[bytes | bytearray]:
    """Return the pieces as one; the caller counts its bytes."""
    if len(pieces) == 1 and not isinstance(pieces[0], memoryview):
        return pieces[0]
    size = sum(map(len, pieces))
    if size <= _COPIED_BYTES:
        return b"".join(pieces)
    whole = bytearray()  # it grows without being copied: the kernel moves large memory
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _COPIED_BYTES):
            whole += view[start : start + _COPIED_BYTES]
            yield 0
    return whole
