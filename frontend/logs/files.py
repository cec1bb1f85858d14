"""A log file that is rolled over when its period ends or it is full; old files are compressed.

A `Rollover` decides when, and names the old files by log4j's ``filePattern``:

    logs/ts_log.%d{dd-MMM}.log.gz      ts_log.20-Nov.log.gz, ts_log.20-Nov.2.log.gz, …
    logs/app-%d{yyyy-MM-dd}-%i.log     app-2026-11-20-1.log, app-2026-11-20-2.log, …

The newest file has the highest number. Where the pattern has no ``%i``, log4j overwrites an old
file of the same name; here the next one gets a number. TorchServe's files have the first pattern.

The rotating handlers of the standard library roll over by size or by time, not by both, and
compress in the thread that logs, which takes seconds for 100 MB. Here another thread does that.
"""

import contextlib
import datetime as dt
import glob
import gzip
import logging
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from marserve.frontend.logs.dates import date_format
from marserve.frontend.regular_files import NoFile, open_file

_TOKEN = re.compile(r"%d(?:\{(?P<date>[^}]*)\})?(?:\{[^}]*\})?|%(?P<width>\??\d*)i")
_OPTIONAL = "?"  # the width of a number that is left out where it is 1
_MAX_WIDTH_DIGITS = 2
_MAX_INTERVAL = 100_000  # periods
_ENDING = re.compile(r"(\.[A-Za-z]+)?$")
# Bytes of collected lines that are written at once.
_MAX_COLLECTED = 1 << 18
#: Letters of date patterns, the shortest period first, and the `time.struct_time` field they show.
_PERIODS = {"s": 5, "m": 4, "HhkK": 3, "dDE": 2, "w": 2, "ML": 1, "yu": 0}
_FIRST = (1, 1, 1, 0, 0, 0)  # of the fields


@dataclass(frozen=True)
class Rollover:
    """When a file is rolled over, and the names of the old files; raises ValueError."""

    pattern: str  # path of the old files, which are compressed if it ends with ``.gz``
    max_bytes: int | None = 100 * 1024 * 1024  # size at which it is rolled over; None for any
    interval: int = 1  # periods of the pattern's date after which it is rolled over; 0 for never
    old_files: int | None = 5  # how many are kept; None for all

    def __post_init__(self) -> None:
        for token in _TOKEN.finditer(self.pattern):
            date_format(token["date"] or "")
            if len(token["width"] or "") > _MAX_WIDTH_DIGITS:
                raise ValueError(f"{token[0][:20]!r} is wider than 99 digits")
        if self.interval > _MAX_INTERVAL:
            raise ValueError(f"the interval {self.interval} is longer than {_MAX_INTERVAL} periods")

    def next_time(self, start: float) -> float:
        """Return when a file that was started at ``start`` is due, in seconds since the epoch."""
        dates = self._fill(str, lambda _: "", lambda _: "")
        if not self.interval or not dates:
            return float("inf")
        letters = set(re.sub(r"'[^']*'", "", dates))
        period = next((period for period in _PERIODS if letters & set(period)), "yu")
        now, field = time.localtime(start), _PERIODS[period]
        fields = [*now[: field + 1], *_FIRST[field + 1 :]]
        fields[field] += 7 * self.interval - now.tm_wday if period == "w" else self.interval
        # Hours and less have the present offset: clocks may be put back meanwhile.
        return time.mktime(time.struct_time((*fields, 0, 0, now.tm_isdst if field > 2 else -1)))

    def new_name(self, start: float) -> Path:
        """Return the path, before it is compressed, of a file that was started at ``start``."""
        moment = dt.datetime.fromtimestamp(start, dt.UTC).astimezone()

        def date(pattern: str) -> str:
            return date_format(pattern)(moment)

        number = max(self.find(lambda pattern: re.escape(date(pattern))).values(), default=0) + 1

        def numbered(width: str) -> str:
            if width == _OPTIONAL:
                return f".{number}" if number > 1 else ""
            return str(number).zfill(int(width or 0))

        return Path(self._fill(date, numbered))

    def find(self, date: Callable[[str], str] | None = None) -> dict[Path, int]:
        """Return the numbers of the old files, compressed or not.

        ``date`` returns the regular expression of a date pattern, by default that of any date.
        """

        def numbered(width: str) -> str:
            return r"(?:\.(\d+))?" if width == _OPTIONAL else r"(\d+)"

        ending = r"(?:\.gz)?" if self.pattern.endswith(".gz") else ""
        name = re.compile(self._fill(date or _date_regex, numbered, re.escape) + ending)
        # A date may contain a slash.
        wild = self._fill(lambda date: re.sub("[^/]+", "*", date), lambda _: "*", glob.escape)
        paths = glob.glob(f"{wild}*")  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = (name.fullmatch(path) for path in paths)
        files = ((Path(match[0]), int(match[1] or 1)) for match in found if match)
        return {path: number for path, number in files if path.is_file()}

    def _fill(
        self,
        date: Callable[[str], str],
        number: Callable[[str], str],
        literal: Callable[[str], str] = str,
    ) -> str:
        """Return the pattern without ``.gz``, with each of its parts replaced by a function."""
        pattern = str(Path(self.pattern)).removesuffix(".gz")
        if not re.search(r"%\d*i", pattern):
            pattern = _ENDING.sub(rf"%{_OPTIONAL}i\1", pattern, count=1)
        parts, at = [], 0
        for token in _TOKEN.finditer(pattern):
            parts.append(literal(pattern[at : token.start()]))
            width = token["width"]
            parts.append(date(token["date"] or "yyyy-MM-dd") if width is None else number(width))
            at = token.end()
        return "".join([*parts, literal(pattern[at:])])


class LogFile(logging.Handler):
    """Appends records to a file, whose directory is made; without ``append`` it starts empty.

    A file that cannot be written, as on a full disk, is reported once on standard error, not for
    each record.

    Attributes:
        collects: Whether lines are written by `flush`, or when they are many.
    """

    collects = False

    def __init__(
        self, path: Path | str, rollover: Rollover | None = None, *, append: bool = True
    ) -> None:
        self.path = Path(path)
        self._is_regular = False
        if not append:
            self.path.unlink(missing_ok=True)
        self._file = self._open()
        super().__init__()  # after what may fail: logging keeps handlers, to close them
        self._collected: list[bytes] = []
        self._collected_bytes = 0
        self._rollover = rollover or daily(self.path)
        self._has_reported = False
        #: Held while an old file gets its name: a number that seems to be free would be used twice.
        self._naming = threading.Lock()
        self._compressor = ThreadPoolExecutor(1, thread_name_prefix=f"{self.path.stem}-gzip")
        limit = self._rollover.max_bytes
        self._max_bytes = float("inf") if limit is None else limit
        self._resume_period()
        if any(self._is_uncompressed(path) for path in self._old_files()):
            self._compressor.submit(self._tidy)  # a server that was killed left them

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging with each record."""
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
            is_full = self._size > 0 and self._size + len(line) > self._max_bytes
            if is_full or record.created >= self._next_time:
                self._roll_over(record)
            self._collected.append(line)
            self._collected_bytes += len(line)
            self._size += len(line)
            if not self.collects or self._collected_bytes > _MAX_COLLECTED:
                self._write()
        except Exception:  # noqa: BLE001 - a request must not fail by its log line
            self.handleError(record)

    def flush(self) -> None:
        """Write the collected lines."""
        with self.lock or contextlib.nullcontext():
            try:
                self._write()
            except OSError:
                self._report_error()

    def _write(self) -> None:
        """Write the collected lines; those that cannot be written are lost."""
        if lines := self._collected:
            self._collected, self._collected_bytes = [], 0
            text = b"".join(lines)
            # Unbuffered. A disk that is nearly full takes a part, and the next write fails. None is
            # of a pipe that another process has made non-blocking, and that is full.
            while text:
                text = text[self._file.write(text) or len(text) :]

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802  logging's name
        """Called when a record cannot be written."""
        self._report_error()

    def _report_error(self) -> None:
        if not self._has_reported:
            self._has_reported = True
            _report(f"{self.path} cannot be written: {sys.exc_info()[1]}")

    def reopen(self) -> None:
        """Open the file again, which may have been moved; raises OSError, and keeps the old one."""
        self.flush()
        with self.lock or contextlib.nullcontext():
            self._replace()
            self._resume_period()

    def tail(self, most: int) -> list[str]:
        """Return the last lines, up to ``most`` bytes of them; raises OSError, also for a link."""
        with open_file(self.path, follow=False) as file:
            start = max(0, file.seek(0, os.SEEK_END) - most)
            file.seek(start)
            lines = file.read(most).decode(errors="replace").split("\n")
        return lines[1 if start else 0 : -1]  # without the part of a line

    def close(self) -> None:
        """Close the file and wait until old ones are compressed. Safe to call twice."""
        self.flush()
        with contextlib.suppress(OSError):
            self._file.close()
        self._compressor.shutdown(wait=True)
        super().close()

    def _open(self) -> BinaryIO:
        """Open the file; raises NoFile if it was a regular file and no longer is one.

        Another kind of file is possible at the start, such as /dev/stdout. A pipe without a reader
        is an OSError. The directory is made, also if it was removed since.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o666)
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if self._is_regular and not is_regular:
            os.close(descriptor)
            raise NoFile
        os.set_blocking(descriptor, True)
        self._is_regular = is_regular
        return open(descriptor, "ab", buffering=0)  # noqa: PTH123 - a descriptor

    def _replace(self) -> None:
        previous, self._file = self._file, self._open()
        previous.close()

    def _resume_period(self) -> None:
        """Start at the last change of the file."""
        status = self.path.stat()
        self._start_period(status.st_mtime if status.st_size else time.time(), status.st_size)

    def _start_period(self, start: float, size: int = 0) -> None:
        self._start, self._size = start, size
        self._next_time = self._rollover.next_time(start)

    def _roll_over(self, record: logging.LogRecord) -> None:
        """Start a new file; where that fails, use the old one for as long again."""
        try:
            self._write()
            if self._size and self._is_regular:
                self._move()
        except OSError:
            self.handleError(record)
        self._start_period(record.created)

    def _move(self) -> None:
        with self._naming:
            old = self._rollover.new_name(self._start)
            old.parent.mkdir(parents=True, exist_ok=True)
            self.path.rename(old)
        try:
            self._replace()
        except OSError:
            old.rename(self.path)
            raise
        self._compressor.submit(self._tidy)

    def _old_files(self) -> dict[Path, int]:
        """Return the old files without the present one, whose name may fit the pattern."""
        found, present = self._rollover.find(), self.path.absolute()
        return {path: number for path, number in found.items() if path.absolute() != present}

    def _is_uncompressed(self, old: Path) -> bool:
        return self._rollover.pattern.endswith(".gz") and old.suffix != ".gz"

    def _tidy(self) -> None:
        """Compress old files, and remove those that are too many."""
        try:
            for path in filter(self._is_uncompressed, self._old_files()):
                _compress(path, self._naming)
            numbers, kept = self._old_files(), self._rollover.old_files
            # Times have the resolution of the kernel's clock, a few milliseconds.
            found = sorted(numbers, key=lambda path: (path.stat().st_mtime_ns, numbers[path], path))
            for path in found[: 0 if kept is None else max(0, len(found) - kept)]:
                path.unlink()
        except OSError as error:
            _report(f"Old files of {self.path} cannot be compressed or removed: {error}")


def daily(path: Path, **options: int) -> Rollover:
    """Return TorchServe's rollover of a file."""
    return Rollover(str(path.with_name(f"{path.stem}.%d{{dd-MMM}}.log.gz")), **options)


def _compress(path: Path, naming: threading.Lock) -> None:
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)  # of a server that was killed
    with open_file(path) as source, gzip.open(part, "xb", compresslevel=6) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    shutil.copystat(path, part)  # files are removed in the order of their times
    with naming:
        part.rename(path.with_name(f"{path.name}.gz"))
        path.unlink()


def _report(sentence: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be a file of the same full disk
        print(sentence, file=sys.stderr)  # noqa: T201


@lru_cache(maxsize=64)
def _date_regex(pattern: str) -> str:
    """Return a regex for the dates of a pattern, and little else: no other file may be removed."""
    format_date = date_format(pattern)
    first = dt.datetime(2028, 1, 1, tzinfo=dt.UTC)
    samples = (first + dt.timedelta(hours=13 * number) for number in range(680))
    texts = {re.sub(r"\d", "0", re.escape(format_date(moment))) for moment in samples}
    return f"(?:{'|'.join(sorted(texts))})".replace("0", r"\d")
