"""Calls a handler's ``input_length`` for some rows, without effect on the batch.

The frontend forms batches of similar lengths by the bytes of requests, because it can neither
import a handler nor wait for one. Samples of the lengths that the handler calculates show it how
they depend on bytes. Only a few rows of some batches are measured, in a small share of the time.
C code that does not return ends with the response timeout.
"""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from marserve.backend.errors import HANDLER_LOG

logger = logging.getLogger(HANDLER_LOG)

#: Instead of a length that the handler could not calculate.
FAILED = -1.0
#: The limits of lengths other than 0; costs are calculated with their fourth powers.
LEAST_LENGTH, LARGEST_LENGTH = 1e-9, 1e15

_ROWS = 4  # of a batch
_SHARE = 0.02  # of the time
_PERIOD = 0.01  # seconds between two batches
_SECONDS = 1.0  # for a row
_PAUSE_SECONDS = 60.0  # after a failure


class _TookTooLong(BaseException):
    """A row took too long. Not an Exception, so that the handler does not catch it."""


class InputLengths:
    """Calls a handler's ``input_length(row)``; ``hook`` returns that method, if there is one."""

    def __init__(
        self,
        hook: Callable[[], Callable[[Any], Any] | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._hook = hook
        self._clock = clock
        self._next = -math.inf

    def of(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
        """Return pairs of place and length of some rows; `FAILED` for an unknown length."""
        measure = self._hook()
        if measure is None or not rows or (began := self._clock()) < self._next:
            return []
        found: list[tuple[int, float]] = []
        step = -(-len(rows) // _ROWS)
        for place in range(0, len(rows), step):
            length = self._length(measure, rows[place])
            found.append((place, length))
            if length == FAILED:
                self._next = self._clock() + _PAUSE_SECONDS
                return found
        now = self._clock()
        self._next = now + max(_PERIOD, (now - began) / _SHARE)
        return found

    def _length(self, measure: Callable[[Any], Any], row: Mapping[str, Any]) -> float:
        try:
            with _limit(_SECONDS):
                return _checked(measure(dict(row)))
        except _TookTooLong:
            logger.warning("input_length took more than %g s; it was interrupted.", _SECONDS)
        except BaseException:  # foreign code, which may also raise KeyboardInterrupt
            logger.warning("input_length failed.", exc_info=True)
        return FAILED


def _checked(length: Any) -> float:
    if isinstance(length, bool | str | bytes | bytearray):
        raise TypeError(f"input_length returned {type(length).__name__}, not a number.")
    number = float(length)  # numpy's and torch's, too
    if not is_length(number):
        raise ValueError(
            f"input_length returned {number}; a length is 0, "
            f"or from {LEAST_LENGTH:g} to {LARGEST_LENGTH:g}."
        )
    return number


def is_length(number: float) -> bool:
    """Whether a number is within the limits of lengths."""
    return number == 0 or LEAST_LENGTH <= number <= LARGEST_LENGTH


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise `_TookTooLong` in the block after some seconds, if that is possible."""
    # Other threads cannot be interrupted, and the timer may be the handler's.
    is_free = threading.current_thread() is threading.main_thread() and not any(
        signal.getitimer(signal.ITIMER_REAL)
    )
    if not is_free:
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _interrupt(_signal: int, _frame: Any) -> None:
    raise _TookTooLong
