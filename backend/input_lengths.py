"""Asks a handler how long its inputs are (``input_length``), now and then, and without any harm.

The frontend forms batches of alike lengths by the bytes of requests, because it can neither import
a handler nor wait for one. What the handler says of some of them shows it what lengths bytes mean.
So only a few rows of a batch are asked about, and only as long as that takes little of the time.

Whatever the handler's method does, the batch is not affected: rows are copies, what it raises is
logged, and it is interrupted when it takes too long (in C code that does not return only the
response timeout helps). After a failure it is left alone for a while.
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

#: In the place of a length: the handler could not tell it.
FAILED = -1.0
#: Lengths other than 0 are within these; costs are calculated by their fourth powers.
LEAST_LENGTH, LARGEST_LENGTH = 1e-9, 1e15

# At most so many rows of a batch, this share of the time, and one batch in these seconds.
_ROWS = 4
_SHARE = 0.02
_PERIOD = 0.01
# A row may take this long.
_SECONDS = 1.0
# Nothing is asked for so long after a failure.
_PAUSE_SECONDS = 60.0


class _TookTooLong(BaseException):
    """Not to be caught by what it interrupts."""


class InputLengths:
    """Asks a handler for the lengths of rows.

    Args:
        hook: Finds the handler's ``input_length(row)``; None if it has none.
        clock: Seconds.
    """

    def __init__(
        self,
        hook: Callable[[], Callable[[Any], Any] | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._hook = hook
        self._clock = clock
        self._next = -math.inf

    def of(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
        """Pairs of place and length of some rows; `FAILED` for a length that is not known."""
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
        except BaseException:  # foreign code, which may raise KeyboardInterrupt, too
            logger.warning("input_length failed.", exc_info=True)
        return FAILED


def _checked(length: Any) -> float:
    """A length as a number; raises TypeError or ValueError for what is none."""
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
    """Whether costs can be learnt by this number."""
    return number == 0 or LEAST_LENGTH <= number <= LARGEST_LENGTH


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Interrupt what runs inside by `_TookTooLong`; only in the main thread, the others cannot be.

    Timers of the handler's own are left alone.
    """
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
