"""A log file that is turned when its time is over or it is full; old ones are compressed and kept.

When, and what the old ones are called, a `Rollover` says by a pattern of log4j's:

    logs/ts_log.%d{dd-MMM}.log.gz      ts_log.20-Nov.log.gz, ts_log.20-Nov.2.log.gz, …
    logs/app-%d{yyyy-MM-dd}-%i.log     app-2026-11-20-1.log, app-2026-11-20-2.log, …

Where it has no ``%i``, log4j writes over the old file of the same name; here the next one gets a
number. The newest has the highest number. Without a `Rollover` it is as in TorchServe, the first
pattern at midnight and at 100 MB.

Turning is a rename, where the records are made. Compressing a hundred megabytes takes seconds, so
a thread does it, also for what a crash left. The handlers of Python's logging turn by time or by
size, not by both, and look the size up at each record.
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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from marserve.frontend.logs.dates import date_format

_TOKEN = re.compile(r"%d(?:\{([^}]*)\})?(?:\{[^}]*\})?|%(\d*)i")
_ANY_NUMBER = 987_654_321
# The letters of date patterns that tell how often a file is turned, the shortest period first.
_PERIODS = {"s": "second", "m": "minute", "Hhk": "hour", "dDEu": "day", "w": "week", "M": "month"}


@dataclass(frozen=True)
class Rollover:
    """When a file is turned, and what the old ones are called.

    Raises:
        ValueError: The pattern's date cannot be read.
    """

    pattern: str  # path of the old files; with ``.gz`` at its end they are compressed
    max_bytes: int | None = 100 * 1024 * 1024  # length at which it is turned; None for any
    interval: int = 1  # periods of the pattern's date after which it is turned; 0 for never
    old_files: int | None = 5  # how many are kept; None for all

    def __post_init__(self) -> None:
        for match in _TOKEN.finditer(self.pattern):
            date_format(match[1] or "")

    @property
    def is_compressed(self) -> bool:
        """Whether old files are."""
        return self.pattern.endswith(".gz")

    def next_turn(self, moment: float) -> float:
        """When a file that was begun at a moment is turned, in seconds since the epoch."""
        dates = [match[1] for match in _TOKEN.finditer(self.pattern) if match[2] is None]
        if not self.interval or not dates:
            return float("inf")
        letters = set(re.sub(r"'[^']*'", "", "".join(date or "yyyy-MM-dd" for date in dates)))
        unit = next((unit for found, unit in _PERIODS.items() if letters & set(found)), "year")
        return _end_of_period(moment, unit, self.interval)

    def free_name(self, moment: float) -> Path:
        """The path, before it is compressed, of a new old file whose records are of a moment."""
        day = dt.datetime.fromtimestamp(moment, dt.UTC).astimezone()
        first = self._path(day, 1)
        head, _, tail = str(self._path(day, _ANY_NUMBER)).partition(str(_ANY_NUMBER))
        numbered = re.compile(rf"{re.escape(head)}(\d+){re.escape(tail)}(\.gz)?")
        found = (numbered.fullmatch(str(file)) for file in first.parent.glob("*"))
        taken = max((int(match[1]) for match in found if match), default=0)
        if first.exists() or Path(f"{first}.gz").exists():
            taken = max(taken, 1)
        return self._path(day, taken + 1)

    def old(self, *, unfinished: bool = False) -> list[Path]:
        """The old files that are there, or those that were to be compressed and are not."""
        if unfinished and not self.is_compressed:
            return []
        pattern = self.pattern.removesuffix(".gz") if unfinished else self.pattern
        name = re.compile(_as_regex(str(Path(pattern))))
        fixed = self.pattern[: next((m.start() for m in _TOKEN.finditer(self.pattern)), None)]
        folder = Path(fixed.rpartition("/")[0] or ("/" if fixed.startswith("/") else "."))
        below = self.pattern[len(str(folder)) :].lstrip("/").count("/")  # dates may have some
        found = folder.glob("*/" * below + "*")
        return [file for file in found if name.fullmatch(str(file)) and file.is_file()]

    def _path(self, day: dt.datetime, number: int) -> Path:
        """The path of an old file before it is compressed."""
        has_index = any(match[2] is not None for match in _TOKEN.finditer(self.pattern))

        def replacement(match: re.Match[str]) -> str:
            if match[2] is not None:
                return str(number).zfill(int(match[2] or 0))
            return date_format(match[1] or "yyyy-MM-dd")(day)

        name = _TOKEN.sub(replacement, self.pattern)
        if not has_index and number > 1:
            stem, ending = _split(name)
            name = f"{stem}.{number}{ending}"
        return Path(name.removesuffix(".gz"))


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
            _complain(f"{self.path} cannot be written: {sys.exc_info()[1]}")

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
            _complain(f"{old} cannot be put away: {error}")


def _complain(sentence: str) -> None:
    with contextlib.suppress(OSError):  # standard error is perhaps a file of the same full disk
        print(sentence, file=sys.stderr)  # noqa: T201


def daily(path: Path, **options: int) -> Rollover:
    """TorchServe's rollover of a file."""
    return Rollover(str(path.with_name(f"{path.stem}.%d{{dd-MMM}}.log.gz")), **options)


def _split(name: str) -> tuple[str, str]:
    """A name before its endings, and these: ``.log.gz``."""
    match = re.search(r"(\.[A-Za-z]+)?(\.gz)?$", name)
    assert match is not None
    return name[: match.start()], match[0]


def _as_regex(pattern: str) -> str:
    stem, ending = _split(pattern)
    regex, at = "", 0
    for match in _TOKEN.finditer(stem):
        token = r"\d+" if match[2] is not None else _date_regex(match[1] or "yyyy-MM-dd")
        regex += re.escape(stem[at : match.start()]) + token
        at = match.end()
    return regex + re.escape(stem[at:]) + r"(\.\d+)?" + re.escape(ending)


@lru_cache(maxsize=64)
def _date_regex(pattern: str) -> str:
    """Matches dates of this layout, and little else: no other file may be removed."""
    format_date = date_format(pattern)
    first = dt.datetime(2028, 1, 1, tzinfo=dt.UTC)
    samples = (first + dt.timedelta(hours=13 * number) for number in range(680))
    words = {re.sub(r"\d", "0", re.escape(format_date(moment))) for moment in samples}
    return f"({'|'.join(sorted(words))})".replace("0", r"\d")


def _end_of_period(moment: float, unit: str, count: int) -> float:
    at = dt.datetime.fromtimestamp(moment)  # noqa: DTZ006 - local, as all times in the logs
    if unit in ("second", "minute", "hour"):
        seconds = {"second": 1, "minute": 60, "hour": 3600}[unit]
        return (moment // seconds + count) * seconds
    begin = dt.datetime.combine(at.date(), dt.time())
    if unit == "day":
        return (begin + dt.timedelta(count)).timestamp()
    if unit == "week":
        return (begin + dt.timedelta(7 * count - at.weekday())).timestamp()
    months = at.year * 12 + (at.month - 1 + count if unit == "month" else 12 * count)
    return dt.datetime(months // 12, months % 12 + 1, 1).timestamp()  # noqa: DTZ001 - local
