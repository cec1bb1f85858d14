"""Writes the output of a worker to the model log, line by line, except lines with metrics."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import IO

model_log = logging.getLogger("MODEL_LOG")

# The longest line; a progress bar may print without newlines.
_MAX_LINE_BYTES = 64 * 1024
# The length of a remembered line, in characters.
_MAX_REMEMBERED = 300
# More than a pipe holds; a grandchild that outlived the worker may print without end.
_READS_AT_THE_END = 64
_METRIC_LINES = (b"[METRICS]", b"INFO > [METRICS]")


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
        self._partial = b""
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
        if self._partial:
            self._log(self._partial)
            self._partial = b""
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    def _on_readable(self) -> None:
        if self._read_available() == b"":
            self.close()

    def _read_available(self) -> bytes | None:
        """Log and return the available bytes: None if there are none now, ``b""`` at the end."""
        # A wake-up may find nothing, because another process may hold and read the pipe too.
        try:
            data = os.read(self._pipe.fileno(), _MAX_LINE_BYTES)
        except BlockingIOError:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._log(line)
        if len(self._partial) > _MAX_LINE_BYTES:
            self._log(self._partial)
            self._partial = b""
        return data

    def _log(self, line: bytes) -> None:
        text = line.decode(errors="backslashreplace").rstrip("\r")
        if self._on_metric_line is not None and line.startswith(_METRIC_LINES):
            self._on_metric_line(text)
            return
        self._last_lines.append(text[:_MAX_REMEMBERED])
        model_log.log(self._level, "%s", text, extra=self._extra)
