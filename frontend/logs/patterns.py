"""log4j's PatternLayout: ``%d{ISO8601} [%-5p] %t %c - %m%n`` as a formatter of Python's logging.

A pattern is parsed once into pieces, each a function of what is being logged. Colours are left out.
What has no meaning here stands in the line as in the pattern, and in `PatternFormatter.remarks`.
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
from dataclasses import dataclass

from marserve.frontend.logs.dates import NAMED, date_format
from marserve.frontend.logs.formats import level_and_thread, timestamp

_STARTED = time.time()


@dataclass(frozen=True)
class _Event:
    """What is laid out: a record, or one of the lines in it."""

    record: logging.LogRecord
    at: float
    message: str
    exception: str


_Piece = Callable[[_Event], str]
#: Makes a piece of a conversion's options; takes remarks.
_Conversion = Callable[[list[str], list[str]], _Piece]


class PatternFormatter(logging.Formatter):
    """Formats records by a pattern of log4j's; a record of several lines line by line."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        #: What of the pattern could not be followed.
        self.remarks: list[str] = []
        # Whoever writes a record ends its line.
        self._pieces = list(_parse(re.sub(r"(%n|\r?\n)$", "", pattern), self.remarks))
        self._shows_exception = re.search(
            r"%(ex|xEx|rEx|throwable|xThrowable|rThrowable)\b", pattern
        )

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        entries = getattr(record, "entries", None)
        if entries is not None:
            events = (_Event(record, entry.at, entry.text, "") for entry in entries)
            return "\n".join(map(self._line, events))
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        text = self._line(_Event(record, record.created, record.getMessage(), exception))
        return text if self._shows_exception or not exception else f"{text}\n{exception}"

    def _line(self, event: _Event) -> str:
        return "".join(piece(event) for piece in self._pieces)


def _parse(pattern: str, remarks: list[str]) -> Iterator[_Piece]:
    at = 0
    while (sign := pattern.find("%", at)) >= 0:
        yield _literal(pattern[at:sign])
        match = _CONVERSION.match(pattern, sign)
        if match is None:
            is_percent = pattern.startswith("%%", sign)
            if not is_percent:
                remarks.append(f"{pattern[sign : sign + 12]!r} has no meaning here")
            yield _literal("%")
            at = sign + 1 + is_percent
            continue
        at = match.end()
        options = []
        while pattern.startswith("{", at):
            option, at = _option(pattern, at)
            options.append(option)
        try:
            piece = _CONVERSIONS[match["name"]](options, remarks)
        except (ValueError, IndexError, OSError, re.error, zoneinfo.ZoneInfoNotFoundError) as error:
            remarks.append(f"{pattern[sign:at]!r} cannot be followed ({error})")
            yield _literal(pattern[sign:at])
        else:
            yield _padded(match, piece)
    yield _literal(pattern[at:])


def _option(pattern: str, at: int) -> tuple[str, int]:
    """What stands in braces, which may hold others, and where it ends."""
    depth = 0
    for end in range(at, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[end], 0)
        if not depth:
            return pattern[at + 1 : end], end + 1
    return pattern[at + 1 :], len(pattern)


def _padded(match: re.Match[str], piece: _Piece) -> _Piece:
    min_width, max_width = int(match["min"] or 0), int(match["max"] or 0)
    fill = "0" if match["zero"] else " "

    def padded(event: _Event) -> str:
        text = piece(event)
        if max_width:
            text = text[-max_width:] if max_width > 0 else text[:-max_width]  # cut at the front
        return text.ljust(min_width) if match["left"] else text.rjust(min_width, fill)

    return padded if min_width or max_width else piece


def _literal(text: str) -> _Piece:
    return lambda _event: text


def _date(options: list[str], _remarks: list[str]) -> _Piece:
    pattern = options[0] if options else ""
    zone = zoneinfo.ZoneInfo(options[1]) if len(options) > 1 else None
    if pattern in ("UNIX", "UNIX_MILLIS"):
        factor = 1 if pattern == "UNIX" else 1000
        return lambda event: str(int(event.at * factor))
    if zone is None and NAMED.get(pattern, pattern) == NAMED["ISO8601"]:
        return lambda event: timestamp(event.at)
    format_date = date_format(pattern)
    return lambda event: format_date(
        dt.datetime.fromtimestamp(event.at, zone or dt.UTC).astimezone(zone)
    )


def _logger(options: list[str], _remarks: list[str]) -> _Piece:
    precision = options[0] if options else ""
    return lambda event: _abbreviated(event.record.name, precision)


def _abbreviated(name: str, precision: str) -> str:
    """``a.b.c`` by log4j's precision: ``1`` is ``c``, ``-1`` is ``b.c``, ``1.`` is ``a.b.c``."""
    parts = name.split(".")
    if re.fullmatch(r"-?\d{1,4}", precision):
        count = int(precision)
        kept = parts[-count:] if count > 0 else parts[-count:] or parts[-1:]
        return ".".join(kept) if count else name
    if match := re.match(r"(\d{1,4})", precision):
        return ".".join([*(part[: int(match[1])] for part in parts[:-1]), parts[-1]])
    return name


def _level(options: list[str], _remarks: list[str]) -> _Piece:
    words = dict(pair.strip().split("=", 1) for pair in ",".join(options).split(",") if "=" in pair)
    length = int(words.pop("length", 0)) or None
    is_lower = words.pop("lowerCase", "") == "true"

    def level(event: _Event) -> str:
        word = level_and_thread(event.record)[0]
        word = words.get(word, word)[:length]
        return word.lower() if is_lower else word

    return level


def _exception(_options: list[str], _remarks: list[str]) -> _Piece:
    return lambda event: f"\n{event.exception}" if event.exception else ""


def _inner(options: list[str], remarks: list[str]) -> _Piece:
    """A pattern inside braces; its colours are left out."""
    pieces = list(_parse(options[0], remarks))
    return lambda event: "".join(piece(event) for piece in pieces)


def _replaced(options: list[str], remarks: list[str]) -> _Piece:
    inner, found = _inner(options, remarks), re.compile(options[1])
    replacement = re.sub(r"\$(\d)", r"\\\1", options[2])
    found.sub(replacement, "")  # raises re.error now rather than for each record
    return lambda event: found.sub(replacement, inner(event))


_ENCODERS: dict[str, Callable[[str], str]] = {
    "JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "CRLF": lambda text: text.replace("\r", "\\r").replace("\n", "\\n"),
    "HTML": html.escape,
    "XML": html.escape,
}


def _encoded(options: list[str], remarks: list[str]) -> _Piece:
    inner, kind = _inner(options, remarks), options[1] if len(options) > 1 else "HTML"
    if kind not in _ENCODERS:
        raise ValueError(f"{kind!r} is no way to encode")
    return lambda event: _ENCODERS[kind](inner(event))


def _shortened(options: list[str], remarks: list[str]) -> _Piece:
    inner, length = _inner(options, remarks), int(options[1])
    return lambda event: inner(event)[:length]


def _of_record(value: Callable[[logging.LogRecord], object]) -> _Conversion:
    return lambda _options, _remarks: lambda event: str(value(event.record))


_BY_NAMES: dict[str, _Conversion] = {
    "d date": _date,
    "p level le": _level,
    "t tn thread threadName": _of_record(lambda record: level_and_thread(record)[1]),
    "T tid threadId": _of_record(lambda record: record.thread or 0),
    "c logger lo C class": _logger,
    "m msg message": lambda _options, _remarks: lambda event: event.message,
    "n": lambda _options, _remarks: _literal("\n"),
    "M method": _of_record(lambda record: record.funcName or ""),
    "L line": _of_record(lambda record: record.lineno),
    "F file": _of_record(lambda record: record.filename),
    "l location": _of_record(lambda record: f"{record.name}({record.filename}:{record.lineno})"),
    "r relative": _of_record(lambda record: round((record.created - _STARTED) * 1000)),
    "pid processId": _of_record(lambda _record: os.getpid()),
    "u uuid": _of_record(lambda _record: uuid.uuid4()),
    "ex throwable xEx xThrowable rEx rThrowable": _exception,
    "highlight style notEmpty varsNotEmpty variablesNotEmpty": _inner,
    "replace": _replaced,
    "enc encode": _encoded,
    "maxLen maxLength": _shortened,
    # What a record of Python's has not: contexts, markers, maps.
    "X mdc MDC x NDC marker markerSimpleName K map MAP": _of_record(lambda _record: ""),
}
_CONVERSIONS = {name: made for names, made in _BY_NAMES.items() for name in names.split()}
_CONVERSION = re.compile(
    # A width of more digits would make lines of gigabytes.
    r"%(?P<left>-)?(?P<zero>0)?(?P<min>\d{1,4})?(?:\.(?P<max>-?\d{1,4}))?"
    rf"(?P<name>{'|'.join(sorted(_CONVERSIONS, key=len, reverse=True))})"  # the longest that fits
)
