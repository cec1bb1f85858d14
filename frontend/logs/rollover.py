"""When a log file is turned, and what the old ones are called.

    logs/ts_log.%d{dd-MMM}.log.gz      ts_log.20-Nov.log.gz, ts_log.20-Nov.2.log.gz, …
    logs/app-%d{yyyy-MM-dd}-%i.log     app-2026-11-20-1.log, app-2026-11-20-2.log, …

The pattern is log4j's. Where it has no ``%i``, log4j writes over the old file of the same name;
here the next one gets a number. The newest has the highest number.
"""

import datetime as dt
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from marserve.frontend.logs.dates import date_format

_TOKEN = re.compile(r"%d(?:\{([^}]*)\})?(?:\{[^}]*\})?|%(\d*)i")
_ANY_NUMBER = 987_654_321
# The letters of date patterns that tell how often a file is turned, the shortest period first.
_PERIODS = (
    *(("s", "second"), ("m", "minute"), ("Hhk", "hour")),
    *(("dDEu", "day"), ("w", "week"), ("M", "month")),
)


@dataclass(frozen=True)
class Rollover:
    """The policy of a file.

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

    @property
    def folder(self) -> Path:
        """Where old files stand; part of the path may be a date."""
        fixed = self.pattern[: next((m.start() for m in _TOKEN.finditer(self.pattern)), None)]
        return Path(fixed.rpartition("/")[0] or ("/" if fixed.startswith("/") else "."))

    def next_turn(self, moment: float) -> float:
        """When a file that was begun at a moment is turned, in seconds since the epoch."""
        dates = [match[1] for match in _TOKEN.finditer(self.pattern) if match[2] is None]
        if not self.interval or not dates:
            return float("inf")
        letters = set(re.sub(r"'[^']*'", "", "".join(date or "yyyy-MM-dd" for date in dates)))
        unit = next((unit for found, unit in _PERIODS if letters & set(found)), "year")
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
        below = self.pattern[len(str(self.folder)) :].lstrip("/").count("/")
        found = self.folder.glob("*/" * below + "*")
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


def _split(name: str) -> tuple[str, str]:
    """A name before its endings, and these: ``.log.gz``."""
    match = re.search(r"(\.[A-Za-z]+)?(\.gz)?$", name)
    assert match is not None
    return name[: match.start()], match[0]


def _as_regex(pattern: str) -> str:
    """What the old files of a pattern are called."""
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
