"""A log file that is turned at midnight and when it is full; what is old is compressed and kept.

    ts_log.log                     is written
    ts_log.20-Nov.log.gz           an old one, named after the day of its records
    ts_log.20-Nov.2.log.gz         the second of that day (TorchServe wrote over the first)

Turning is a rename, where the records are made. Compressing a hundred megabytes takes seconds, so
a thread does it; zlib leaves the interpreter to others meanwhile.
"""

import contextlib
import datetime as dt
import gzip
import logging
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

_MAX_BYTES = 100 * 1024 * 1024
_OLD_FILES = 5
# As in TorchServe whatever the language of the system.
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class LogFile(logging.Handler):
    """Writes records to a file.

    A full disk is no reason to stop serving: it is told once, not per record.

    Args:
        path: The file; its directory must exist. What stands in it is kept.
        max_bytes: Length at which it is turned.
        old_files: How many old ones are kept.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(
        self, path: Path | str, max_bytes: int = _MAX_BYTES, old_files: int = _OLD_FILES
    ) -> None:
        super().__init__()
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._old_files = old_files
        self._told = False
        self._compressor = ThreadPoolExecutor(1, thread_name_prefix=f"{self.path.stem}-gzip")
        self._open()
        for old in _turned(self.path, ".log"):  # a crash left them
            self._compress(old)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging with each record."""
        try:
            line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
            is_full = self._size > 0 and self._size + len(line) > self._max_bytes
            if is_full or record.created >= self._midnight:
                self._try_turn(record)
            self._file.write(line)
            self._size += len(line)
        except Exception:  # noqa: BLE001 - a formatter's mistake must not cost a request
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Called when a record cannot be written."""
        if not self._told:
            self._told = True
            print(f"{self.path} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)  # noqa: T201
        del record

    def reopen(self) -> None:
        """Go on in a new file, where another program has moved this one.

        Raises:
            OSError: It cannot be opened; the old one is gone on with.
        """
        self.acquire()
        try:
            before = self._file
            self._open()
            before.close()
        finally:
            self.release()

    def close(self) -> None:
        """Close the file; waits until what is old has been compressed. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._compressor.shutdown(wait=True)
        super().close()

    def _open(self) -> None:
        self._file: BinaryIO = self.path.open("ab", buffering=0)
        status = self.path.stat()
        self._size = status.st_size
        self._begin_day(status.st_mtime if self._size else time.time())

    def _begin_day(self, now: float) -> None:
        self._day = dt.date.fromtimestamp(now)  # noqa: DTZ012 - local, as all times in the logs
        tomorrow = dt.datetime.combine(self._day + dt.timedelta(1), dt.time())
        self._midnight = tomorrow.timestamp()

    def _try_turn(self, record: logging.LogRecord) -> None:
        """Begin a new file; where that cannot be done, go on with the old one for as long again."""
        try:
            if self._size:
                self._put_away()
        except OSError:
            self.handleError(record)
            self._size = 0
        self._begin_day(record.created)

    def _put_away(self) -> None:
        old = _free_name(self.path, self._day)
        self.path.rename(old)
        full = self._file
        try:
            self._open()
        except OSError:
            old.rename(self.path)
            raise
        full.close()
        self._compress(old)

    def _compress(self, old: Path) -> None:
        self._compressor.submit(_compress, old, self.path, self._old_files)


def _free_name(path: Path, day: dt.date) -> Path:
    stem = f"{path.stem}.{day.day:02d}-{_MONTHS[day.month - 1]}"
    number, name = 1, stem
    while any(path.with_name(f"{name}.log{ending}").exists() for ending in ("", ".gz")):
        number += 1
        name = f"{stem}.{number}"
    return path.with_name(f"{name}.log")


def _compress(old: Path, path: Path, old_files: int) -> None:
    """Compress a file that was turned, then remove what is too old."""
    try:
        part = old.with_suffix(".part")
        with old.open("rb") as source, gzip.open(part, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        part.rename(old.with_name(f"{old.name}.gz"))
        old.unlink()
        _remove_oldest(path, old_files)
    except OSError as error:
        print(f"{old} cannot be compressed: {error}", file=sys.stderr)  # noqa: T201 - nor logged


def _remove_oldest(path: Path, keep: int) -> None:
    found = sorted(_turned(path, ".log.gz"), key=lambda each: each.stat().st_mtime_ns)
    for each in found[: max(0, len(found) - keep)]:
        each.unlink()


def _turned(path: Path, ending: str) -> list[Path]:
    """What was turned of a file, in names with this ending."""
    name = re.compile(
        rf"{re.escape(path.stem)}\.\d\d-({'|'.join(_MONTHS)})(\.\d+)?{re.escape(ending)}"
    )
    return [each for each in path.parent.iterdir() if name.fullmatch(each.name)]
