"""log4j's PatternLayout, ``%d{ISO8601} [%-5p] %t %c - %m%n``, as a formatter of Python's logging.

A pattern is parsed once into pieces, each a function from a record to a text. Colours are left out.
A conversion that has no counterpart is written as it stands, and `PatternFormatter.remarks` names
it.
"""

import datetime as dt
import html
import json
import logging
import os
import re
import time
import uuid
import zoneinfo
from collections.abc import Callable, Iterator

from marserve.frontend.logs.dates import NAMED, date_format
from marserve.frontend.logs.formats import (
    EntryFormatter,
    level_and_thread,
    timestamp,
    traceback_of,
)

_STARTED = time.time()

_Piece = Callable[[logging.LogRecord], str]
#: Makes a piece of the options of a conversion; may append to the remarks.
_Conversion = Callable[[list[str], list[str]], _Piece]


class PatternFormatter(EntryFormatter):
    """Formats records by a pattern of log4j."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        #: Sentences on the parts of the pattern that have no counterpart.
        self.remarks: list[str] = []
        # The handler that writes a record ends its line.
        self._pieces = list(_parse(re.sub(r"(%n|\r?\n)$", "", pattern), self.remarks))
        self._has_exception = re.search(r"%(ex|xEx|rEx|throwable|xThrowable|rThrowable)\b", pattern)

    def format_line(self, record: logging.LogRecord) -> str:
        """Return a record in the layout; its exception is at the end if the pattern lacks it."""
        line = "".join([piece(record) for piece in self._pieces])
        return line if self._has_exception else line + _exception(record)


def _parse(pattern: str, remarks: list[str]) -> Iterator[_Piece]:
    at = 0
    while (sign := pattern.find("%", at)) >= 0:
        yield _literal(pattern[at:sign])
        match = _CONVERSION.match(pattern, sign)
        if match is None:
            is_percent = pattern.startswith("%%", sign)
            if not is_percent:
                remarks.append(f"{pattern[sign : sign + 12]!r} has no counterpart here")
            yield _literal("%")
            at = sign + 1 + is_percent
            continue
        at = match.end()
        options = []
        while pattern.startswith("{", at):
            option, at = _option(pattern, at)
            options.append(option)
        try:
            yield _padded(match, _CONVERSIONS[match["name"]](options, remarks))
        except (ValueError, IndexError, OSError, re.error, zoneinfo.ZoneInfoNotFoundError) as error:
            remarks.append(f"{pattern[sign:at]!r} cannot be used ({error})")
            yield _literal(pattern[sign:at])
    yield _literal(pattern[at:])


def _option(pattern: str, at: int) -> tuple[str, int]:
    """Return the text in braces, which may contain others, and the position behind it."""
    depth = 0
    for end in range(at, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[end], 0)
        if not depth:
            return pattern[at + 1 : end], end + 1
    return pattern[at + 1 :], len(pattern)


def _padded(match: re.Match[str], piece: _Piece) -> _Piece:
    min_width, max_width = int(match["min"] or 0), int(match["max"] or 0)
    fill = "0" if match["zero"] else " "

    def padded(record: logging.LogRecord) -> str:
        text = piece(record)
        if max_width:
            text = text[-max_width:] if max_width > 0 else text[:-max_width]  # cuts the beginning
        return text.ljust(min_width) if match["left"] else text.rjust(min_width, fill)

    return padded if min_width or max_width else piece


def _literal(text: str) -> _Piece:
    return lambda _record: text


def _date(options: list[str], _remarks: list[str]) -> _Piece:
    pattern = options[0] if options else ""
    zone = zoneinfo.ZoneInfo(options[1]) if len(options) > 1 else None
    if pattern in ("UNIX", "UNIX_MILLIS"):
        factor = 1 if pattern == "UNIX" else 1000
        return lambda record: str(int(record.created * factor))
    if zone is None and NAMED.get(pattern, pattern) == NAMED["ISO8601"]:
        return lambda record: timestamp(record.created)
    format_date = date_format(pattern)
    return lambda record: format_date(
        dt.datetime.fromtimestamp(record.created, dt.UTC).astimezone(zone)
    )


def _logger(options: list[str], _remarks: list[str]) -> _Piece:
    precision = options[0] if options else ""
    return lambda record: _abbreviated(record.name, precision)


def _abbreviated(name: str, precision: str) -> str:
    """Shorten a logger's name by log4j's precision.

    Of ``ab.cd.ef``, ``1`` keeps ``ef``, ``-1`` keeps ``cd.ef``, and ``1.`` makes ``a.c.ef``.
    """
    parts = name.split(".")
    if re.fullmatch(r"-?\d{1,4}", precision):
        count = int(precision)
        return ".".join(parts[-count:] or parts[-1:])
    if match := re.match(r"(\d{1,4})", precision):
        return ".".join([*(part[: int(match[1])] for part in parts[:-1]), parts[-1]])
    return name


def _level(options: list[str], _remarks: list[str]) -> _Piece:
    names = dict(pair.strip().split("=", 1) for pair in ",".join(options).split(",") if "=" in pair)
    length = int(names.pop("length", 0)) or None
    is_lower = names.pop("lowerCase", "") == "true"

    def level(record: logging.LogRecord) -> str:
        name = level_and_thread(record)[0]
        name = names.get(name, name)[:length]
        return name.lower() if is_lower else name

    return level


def _exception(record: logging.LogRecord) -> str:
    text = traceback_of(record)
    return f"\n{text}" if text else ""


def _inner(options: list[str], remarks: list[str]) -> _Piece:
    """A pattern inside braces."""
    pieces = list(_parse(options[0], remarks))
    return lambda record: "".join([piece(record) for piece in pieces])


def _replaced(options: list[str], remarks: list[str]) -> _Piece:
    inner, found = _inner(options, remarks), re.compile(options[1])
    replacement = re.sub(r"\$(\d)", r"\\\1", options[2])
    found.sub(replacement, "")  # raises re.error here instead of at each record
    return lambda record: found.sub(replacement, inner(record))


_ENCODERS: dict[str, Callable[[str], str]] = {
    "JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "CRLF": lambda text: text.replace("\r", "\\r").replace("\n", "\\n"),
    "HTML": html.escape,
    "XML": html.escape,
}


def _encoded(options: list[str], remarks: list[str]) -> _Piece:
    inner, kind = _inner(options, remarks), options[1] if len(options) > 1 else "HTML"
    if kind not in _ENCODERS:
        raise ValueError(f"{kind!r} is not an encoding")
    return lambda record: _ENCODERS[kind](inner(record))


def _shortened(options: list[str], remarks: list[str]) -> _Piece:
    inner, length = _inner(options, remarks), int(options[1])
    return lambda record: inner(record)[:length]


def _of_record(value: Callable[[logging.LogRecord], object]) -> _Conversion:
    return lambda _options, _remarks: lambda record: str(value(record))


_BY_NAMES: dict[str, _Conversion] = {
    "d date": _date,
    "p level le": _level,
    "t tn thread threadName": _of_record(lambda record: level_and_thread(record)[1]),
    "T tid threadId": _of_record(lambda record: record.thread or 0),
    "c logger lo C class": _logger,
    "m msg message": _of_record(logging.LogRecord.getMessage),
    "n": _of_record(lambda _record: "\n"),
    "M method": _of_record(lambda record: record.funcName or ""),
    "L line": _of_record(lambda record: record.lineno),
    "F file": _of_record(lambda record: record.filename),
    "l location": _of_record(lambda record: f"{record.name}({record.filename}:{record.lineno})"),
    "r relative": _of_record(lambda record: round((record.created - _STARTED) * 1000)),
    "pid processId": _of_record(lambda _record: os.getpid()),
    "u uuid": _of_record(lambda _record: uuid.uuid4()),
    "ex throwable xEx xThrowable rEx rThrowable": _of_record(_exception),
    "highlight style notEmpty varsNotEmpty variablesNotEmpty": _inner,
    "replace": _replaced,
    "enc encode": _encoded,
    "maxLen maxLength": _shortened,
    # Python's records have no contexts, markers and maps.
    "X mdc MDC x NDC marker markerSimpleName K map MAP": _of_record(lambda _record: ""),
}
_CONVERSIONS = {name: made for names, made in _BY_NAMES.items() for name in names.split()}
_CONVERSION = re.compile(
    # A width of more digits would make lines of gigabytes.
    r"%(?P<left>-)?(?P<zero>0)?(?P<min>\d{1,4})?(?:\.(?P<max>-?\d{1,4}))?"
    rf"(?P<name>{'|'.join(sorted(_CONVERSIONS, key=len, reverse=True))})"  # the longest first
)
