"""Threads that write log records, so that no other code waits for a disk or a reader.

Each target (a file, the console, a handler of the operator's configuration) has its own: a console
whose reader has stopped, as by Ctrl-S, holds up no file. Up to `_MAX_BYTES` wait for a target.
Further records are left out, counted and reported: by a line in the other logs when it begins, and
by one in the target itself when it goes on.
"""

import contextlib
import copy
import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence

from marserve.frontend.logs.files import LogFile
from marserve.frontend.logs.formats import traceback_of

logger = logging.getLogger(__name__)

# The size of the records that may wait for a target.
_MAX_BYTES = 16 << 20
# The approximate size of a record without its text.
_RECORD_BYTES = 500
# Above this size the output of workers is not read, if the target takes records.
_PAUSE_BYTES = _MAX_BYTES // 4
# Records of about this size are written together.
_FLUSH_BYTES = 1 << 18
# A target that has taken nothing for so long takes none now.
_STALL_SECONDS = 1.0
# The time at the stop in which all targets together can take what waits.
_CLOSE_SECONDS = 2.0
_POLL_SECONDS = 0.002
# How long a thread rests for each byte that it has written, and at most. Each turn costs the event
# loop waits for Python's lock: with 0.05 s at most, 5 % of the rate of a model without work. Above
# 50 kB in a second the rests grow to the longest.
_REST_SECONDS = 2e-5
_MAX_REST_SECONDS = 0.2
# Rests that are left out after a pause: the lines of a single request, which are logged at several
# moments, are in the file when its client has the answer and reads the file.
_BURST_SECONDS = 0.1
# Python's lock is given up after so many lines that Python formats one by one.
_LINES_AT_ONCE = 100

_writers: weakref.WeakSet["LogWriter"] = weakref.WeakSet()


class LogWriter(logging.Handler):
    """Passes records to a target in a thread of its own.

    Attributes:
        target: The handler that writes.
        dropped: How many lines were left out.
    """

    def __init__(self, target: logging.Handler) -> None:
        super().__init__(target.level)
        self.target = target
        self.dropped = 0
        self._missing = 0  # of them, those that the target does not know of
        self._records: queue.SimpleQueue[tuple[int, logging.LogRecord] | None] = queue.SimpleQueue()
        self._put = self._taken = 0  # bytes
        self._taken_at = time.monotonic()
        self._closing = threading.Event()
        self._file = target if isinstance(target, LogFile) else None
        if self._file is not None:
            # Each write waits for Python's lock, and the event loop has to give it away.
            self._file.collects = True
        self._takes_entries = getattr(target.formatter, "takes_entries", False)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()
        _writers.add(self)

    @property
    def name_of_target(self) -> str:
        """The file's path, or the kind of the target."""
        path = getattr(self.target, "path", None)
        return type(self.target).__name__ if path is None else str(path)

    @property
    def position(self) -> int:
        """The bytes that were logged so far."""
        return self._put

    def has_written(self, position: int) -> bool:
        """Return whether all is written that was logged up to a position."""
        return self._taken >= position

    @property
    def waiting(self) -> int:
        """Bytes that wait to be written."""
        return self._put - self._taken

    @property
    def is_behind(self) -> bool:
        """Whether much waits for a target that takes records."""
        is_stalled = time.monotonic() - self._taken_at > _STALL_SECONDS
        return self.waiting > _PAUSE_BYTES and not is_stalled

    @property
    def is_stuck(self) -> bool:
        """Whether it was closed, and its thread still waits for the target."""
        return self._closing.is_set() and self._thread.is_alive()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging with each record, under the handler's lock."""
        record = _detached(record, with_entries=self._takes_entries)
        size = _RECORD_BYTES + len(record.msg) + len(record.exc_text or "")
        waiting = self.waiting
        if waiting and waiting + size > _MAX_BYTES:
            lines = len(getattr(record, "lines", "1"))
            self.dropped += lines
            self._missing += lines
            if self._missing == lines:  # not for this target, which takes no record now
                logger.error("%s takes no log lines; some will be missing.", self.name_of_target)
            return
        if not waiting:
            self._taken_at = time.monotonic()
        self._put += size
        self._records.put((size, record))

    def end(self) -> None:
        """Let the thread end after what waits."""
        if not self._closing.is_set():
            self._closing.set()
            self._records.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(seconds)

    def close(self) -> None:
        """Close the target after what waits; at once, if the thread was told to end before."""
        if not self._closing.is_set():
            self.end()
            self.join(_CLOSE_SECONDS)
        if not self.is_stuck:  # else closing it could wait, too
            self.target.close()
        super().close()

    def _run(self) -> None:
        untaken = turn = 0  # bytes
        rested = 0.0  # the moment until which the thread should rest
        while (item := self._records.get()) is not None:
            size, record = item
            self._write(record)
            untaken += size
            turn += size
            is_last = self._records.empty()
            if self._file is not None:
                if not is_last and untaken < _FLUSH_BYTES:
                    continue
                self._file.flush()
            self._taken += untaken
            self._taken_at, untaken = time.monotonic(), 0
            if not is_last:
                continue
            if self._missing:
                self._report_missing()
            # What comes meanwhile is written at once: a thread that is woken for each record
            # would interrupt the event loop more often.
            now = time.monotonic()
            rested = max(rested, now - _BURST_SECONDS) + turn * _REST_SECONDS
            rested, turn = min(rested, now + _MAX_REST_SECONDS), 0
            if rested > now:
                self._closing.wait(rested - now)
        if self._file is not None:
            self._file.flush()
            self._taken += untaken

    def _write(self, record: logging.LogRecord) -> None:
        lines: Sequence[str] | None = getattr(record, "lines", None)
        if lines is None or self._takes_lines():
            self.target.handle(record)
            return
        for number, line in enumerate(lines):
            single = copy.copy(record)
            single.msg = line
            del single.__dict__["lines"]
            self.target.handle(single)
            if number % _LINES_AT_ONCE == _LINES_AT_ONCE - 1:
                time.sleep(0)

    def _takes_lines(self) -> bool:
        filters = [each for each in self.target.filters if not isinstance(each, OfRecords)]
        return not filters and getattr(self.target.formatter, "takes_lines", False)

    def _report_missing(self) -> None:
        with self.lock or contextlib.nullcontext():  # `emit` adds to it in another thread
            missing, self._missing = self._missing, 0
        text = f"{missing} log lines are missing here: {self.name_of_target} took none in time."
        self.target.handle(logging.LogRecord(__name__, logging.ERROR, "", 0, text, None, None))
        if self._file is not None:
            self._file.flush()


class OfRecords(logging.Filter):
    """A filter that does not read the text of a record."""


def end_writers(seconds: float = _CLOSE_SECONDS) -> None:
    """Write what waits, and end the threads, in a limited time."""
    deadline = time.monotonic() + seconds
    for each in [*_writers]:
        each.end()
    for each in [*_writers]:
        each.join(max(0.0, deadline - time.monotonic()))


def wait_written(seconds: float = _CLOSE_SECONDS, *, target: logging.Handler | None = None) -> bool:
    """Wait until all is written that was logged so far, or what was for one target.

    Returns:
        Whether that is so; False after a time.
    """
    deadline = time.monotonic() + seconds
    writers = [each for each in [*_writers] if target in (None, each.target)]
    logged = [each.position for each in writers]
    while not all(map(LogWriter.has_written, writers, logged)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def are_behind() -> bool:
    """Return whether a target takes records, but fewer than come: who can wait for it should."""
    return any(each.is_behind for each in _writers)


def are_stuck() -> bool:
    """Return whether a thread that was to end waits for its target."""
    return any(each.is_stuck for each in [*_writers])


def dropped_lines() -> Mapping[str, int]:
    """Return how many lines of each target were left out."""
    dropped = Counter[str]()
    for each in [*_writers]:
        dropped[each.name_of_target] += each.dropped
    return dropped


def _detached(record: logging.LogRecord, *, with_entries: bool) -> logging.LogRecord:
    """Return a record without the objects that it was made of, which may change, or are many."""
    if record.args:
        record.msg, record.args = record.getMessage(), None
    elif not isinstance(record.msg, str):
        record.msg = str(record.msg)
    traceback_of(record)
    record.exc_info = None
    if with_entries or getattr(record, "entries", None) is None:
        return record
    record = copy.copy(record)  # another target may need them
    record.__dict__["entries"] = None
    return record
