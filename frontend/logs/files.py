"""A log file that is turned when its time is over or it is full; old ones are compressed and kept.

When, and what the old ones are called, a `Rollover` says; without one it is as in TorchServe, at
midnight and at 100 MB:

    ts_log.log                     is written
    ts_log.20-Nov.log.gz           an old one, named after the day of its records
    ts_log.20-Nov.2.log.gz         the second of that day (TorchServe wrote over the first)

Turning is a rename, where the records are made. Compressing a hundred megabytes takes seconds, so
a thread does it, also for what a crash left. The handlers of Python's logging turn by time or by
size, not by both, and look the size up at each record.
"""

import contextlib
import gzip
import logging
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from marserve.frontend.logs.rollover import Rollover


class LogFile(logging.Handler):
    """Appends records to a file, whose directory must exist.

    A full disk is no reason to stop serving: it is mentioned once, not per record.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path | str, rollover: Rollover | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        self._rollover = rollover or daily(self.path)
        self._has_complained = False
        self._compressor = ThreadPoolExecutor(1, thread_name_prefix=f"{self.path.stem}-gzip")
        self._open()
        for old in self._old_files(unfinished=True):  # a crash left them
            self._compressor.submit(self._tidy, old)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging with each record."""
        try:
            line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
            limit = self._rollover.max_bytes
            is_full = limit is not None and self._size > 0 and self._size + len(line) > limit
            if is_full or record.created >= self._turn_at:
                self._try_turn(record)
            self._file.write(line)
            self._size += len(line)
        except Exception:  # noqa: BLE001 - a formatter's mistake must not cost a request
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802  logging's name
        """Called when a record cannot be written."""
        if not self._has_complained:
            self._has_complained = True
            print(f"{self.path} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)  # noqa: T201

    def reopen(self) -> None:
        """Write to a new file, where another program has moved this one.

        Raises:
            OSError: It cannot be opened; records go to the old one.
        """
        with self.lock or contextlib.nullcontext():
            before = self._file
            self._open()
            before.close()

    def close(self) -> None:
        """Close the file and wait until old ones are compressed. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._compressor.shutdown(wait=True)
        super().close()

    def _open(self) -> None:
        self._file: BinaryIO = self.path.open("ab", buffering=0)
        status = self.path.stat()
        self._size = status.st_size
        self._begin_period(status.st_mtime if self._size else time.time())

    def _begin_period(self, now: float) -> None:
        self._begun = now
        self._turn_at = self._rollover.next_turn(now)

    def _try_turn(self, record: logging.LogRecord) -> None:
        """Begin a new file; where that cannot be done, go on with the old one for as long again."""
        try:
            if self._size:
                self._turn()
        except OSError:
            self.handleError(record)
            self._size = 0
        self._begin_period(record.created)

    def _turn(self) -> None:
        old = self._rollover.free_name(self._begun)
        old.parent.mkdir(parents=True, exist_ok=True)
        self.path.rename(old)
        full = self._file
        try:
            self._open()
        except OSError:
            old.rename(self.path)
            raise
        full.close()
        self._compressor.submit(self._tidy, old)

    def _old_files(self, *, unfinished: bool = False) -> list[Path]:
        """Without the one that is written, whose name may look like an old one's."""
        found = self._rollover.old(unfinished=unfinished)
        return [file for file in found if file.absolute() != self.path.absolute()]

    def _tidy(self, old: Path) -> None:
        """Compress a file that was turned, where that is wanted, and remove what is too old."""
        try:
            if self._rollover.is_compressed:
                part = old.with_suffix(".part")
                with old.open("rb") as source, gzip.open(part, "wb", compresslevel=6) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                part.rename(old.with_name(f"{old.name}.gz"))
                old.unlink()
            if (kept := self._rollover.old_files) is not None:
                found = sorted(self._old_files(), key=lambda file: file.stat().st_mtime_ns)
                for file in found[: max(0, len(found) - kept)]:
                    file.unlink()
        except OSError as error:
            print(f"{old} cannot be put away: {error}", file=sys.stderr)  # noqa: T201 - nor logged


def daily(path: Path, **options: int) -> Rollover:
    """TorchServe's rollover of a file."""
    return Rollover(str(path.with_name(f"{path.stem}.%d{{dd-MMM}}.log.gz")), **options)
