"""Writes the output of a worker to the model log, except lines with metrics.

A handler that prints without end must cost the event loop little: the lines of one read are one
record, and a pipe is read once in 10 ms. So 6.5 MB/s are read of it, and if it prints faster, or
the log is written slower, it waits. For a log that is not written at all, lines are left out
(`logs.writers`).
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import IO

from marserve.frontend.aio.lines import MAX_LINE_BYTES, LineCutter
from marserve.frontend.logs.formats import log_lines
from marserve.frontend.logs.writers import are_behind

model_log = logging.getLogger("MODEL_LOG")

# What is read at once while metrics come, each of which is work for the event loop.
_METRICS_BYTES = 8 * 1024
# The time between two reads: of a handler that prints faster, each costs as much as one line.
_INTERVAL_SECONDS = 0.01
# The length of a remembered line, in characters.
_MAX_REMEMBERED = 300
# Of the lines of a read, how many can be remembered.
_MAX_LAST_LINES = 100
# More than a pipe holds; a grandchild that outlived the worker may print without end.
_READS_AT_THE_END = 64
_METRIC_LINES = ("[METRICS]", "INFO > [METRICS]")


class OutputLog:
    """Sends each line of an output pipe to the model log.

    It uses a reader on the descriptor, not a transport: nothing is awaited in the constructor, so
    that it cannot be cancelled half-way. Lines that begin with ``[METRICS]`` are given to
    ``on_metric_line`` and not logged.
    """

    def __init__(
        self,
        pipe: IO[bytes],
        level: int,
        name: str,
        on_metric_line: Callable[[str], None] | None = None,
        last_lines: "deque[str] | None" = None,
    ) -> None:
        self._pipe = pipe
        self._level = level
        self._extra = {"worker": name}
        self._on_metric_line = on_metric_line
        self._last_lines: deque[str] = deque(maxlen=0) if last_lines is None else last_lines
        self._cutter = LineCutter()
        self._bytes_at_once = MAX_LINE_BYTES
        os.set_blocking(pipe.fileno(), False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe.fileno(), self._on_readable)

    def close(self) -> None:
        """Log the rest and close the pipe. Safe to call twice."""
        if self._pipe.closed:
            return
        for _ in range(_READS_AT_THE_END):
            if not self._read_available():
                break
        self._log(self._cutter.cut(b"", is_last=True))
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    def _on_readable(self) -> None:
        if self._read_available() == b"":
            self.close()
            return
        self._loop.remove_reader(self._pipe.fileno())
        self._loop.call_later(_INTERVAL_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._pipe.closed:
            return
        if are_behind():
            self._loop.call_later(_INTERVAL_SECONDS, self._resume)
        else:
            self._loop.add_reader(self._pipe.fileno(), self._on_readable)

    def _read_available(self) -> bytes | None:
        """Log and return the available bytes: None if there are none now, ``b""`` at the end."""
        # A wake-up may find nothing, because another process may hold and read the pipe too.
        try:
            data = os.read(self._pipe.fileno(), self._bytes_at_once)
        except BlockingIOError:
            return None
        self._log(self._cutter.cut(data))
        return data

    def _log(self, lines: list[str]) -> None:
        if self._on_metric_line is not None:
            metrics = [line for line in lines if line.startswith(_METRIC_LINES)]
            for line in metrics:
                self._on_metric_line(line)
            if metrics:
                lines = [line for line in lines if not line.startswith(_METRIC_LINES)]
            self._bytes_at_once = _METRICS_BYTES if metrics else MAX_LINE_BYTES
        self._last_lines.extend([line[:_MAX_REMEMBERED] for line in lines[-_MAX_LAST_LINES:]])
        if lines:
            log_lines(model_log, self._level, lines, self._extra)
