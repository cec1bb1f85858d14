"""The output of a worker, line by line, into the model log; but for lines that are metrics."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import IO

model_log = logging.getLogger("MODEL_LOG")

# A progress bar without newlines would otherwise be gathered for ever.
_MAX_LINE_BYTES = 64 * 1024
# Of a line that is remembered.
_MAX_REMEMBERED = 300
# More than a pipe holds. A grandchild that outlived the worker may print without end.
_READS_AT_THE_END = 64
_METRIC_LINES = (b"[METRICS]", b"INFO > [METRICS]")


class OutputLog:
    """Sends each line of an output pipe to the model log.

    A reader on the descriptor rather than a transport: nothing has to be awaited to begin, so
    nothing can be cancelled half-way.

    Args:
        pipe: Its reading end.
        level: Of the records.
        name: Stands in the records where others name their thread.
        on_metric_line: Called with a line that begins with ``[METRICS]``, which is then not logged.
        last_lines: Remembers what is logged, as far as it has room.
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
        """Log what is left and close the pipe. Safe to call twice."""
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
        """Log what is there; None where there is nothing now, nothing (``b""``) at the end.

        A wake-up may find nothing: another process may hold the reading end and read it, too.
        """
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
