"""log4j's PatternLayout: ``%d{ISO8601} [%-5p] %t %c - %m%n`` as a formatter of Python's logging.

A pattern is parsed once into pieces, each a function of what is being logged. Colours are left out
(``%highlight{…}`` and ``%style{…}`` show what is inside them). What a pattern says that has no
meaning here stands in the line as it stands in the pattern, and is told in `PatternFormatter.told`.
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
from marserve.frontend.logs.setup import level_and_thread, timestamp

_STARTED = time.time()
_CONVERSION = re.compile(
    r"%(?P<left>-)?(?P<zero>0)?(?P<least>\d+)?(?:\.(?P<most>-?\d+))?(?P<name>[A-Za-z]+)"
)


@dataclass(frozen=True)
class _Logged:
    """What is laid out: a record, or one of the lines in it."""

    record: logging.LogRecord
    at: float
    message: str
    exception: str


_Piece = Callable[[_Logged], str]


class PatternFormatter(logging.Formatter):
    """Formats records as a pattern of log4j says; a record of several lines line by line.

    Args:
        pattern: Of log4j's PatternLayout.

    Attributes:
        told: What of the pattern could not be followed.
    """

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.told: list[str] = []
        # Whoever writes a record ends its line.
        self._pieces = list(_parse(re.sub(r"(%n|\r?\n)$", "", pattern), self.told))
        self._shows_exception = re.search(
            r"%(ex|xEx|rEx|throwable|xThrowable|rThrowable)\b", pattern
        )

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        entries = getattr(record, "entries", None)
        if entries is not None:
            return "\n".join(
                self._laid_out(_Logged(record, one.at, one.text, "")) for one in entries
            )
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        text = self._laid_out(_Logged(record, record.created, record.getMessage(), exception))
        return text if self._shows_exception or not exception else f"{text}\n{exception}"

    def _laid_out(self, logged: _Logged) -> str:
        return "".join(piece(logged) for piece in self._pieces)


def _parse(pattern: str, told: list[str]) -> Iterator[_Piece]:
    at = 0
    while at < len(pattern):
        sign = pattern.find("%", at)
        if sign < 0:
            sign = len(pattern)
        if sign > at:
            yield _literal(pattern[at:sign])
        if sign == len(pattern):
            return
        if pattern.startswith("%%", sign):
            yield _literal("%")
            at = sign + 2
            continue
        match = _CONVERSION.match(pattern, sign)
        found = _named(match["name"]) if match else None
        if match is None or found is None:
            told.append(f"{pattern[sign : sign + 12]!r} has no meaning here")
            yield _literal("%")
            at = sign + 1
            continue
        name, at = found, match.start("name") + len(found)
        options = []
        while pattern.startswith("{", at):
            option, at = _option(pattern, at)
            options.append(option)
        try:
            piece = _CONVERSIONS[name](options, told)
        except (ValueError, IndexError, re.error, zoneinfo.ZoneInfoNotFoundError) as error:
            told.append(f"{pattern[sign:at]!r} cannot be followed ({error})")
            yield _literal(pattern[sign:at])
        else:
            yield _padded(match, piece)


def _named(text: str) -> str | None:
    """The longest name of a conversion that a text begins with."""
    lengths = range(len(text), 0, -1)
    return next((text[:length] for length in lengths if text[:length] in _CONVERSIONS), None)


def _option(pattern: str, at: int) -> tuple[str, int]:
    """What stands in braces, which may hold others, and where it ends."""
    depth = 0
    for end in range(at, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[end], 0)
        if not depth:
            return pattern[at + 1 : end], end + 1
    return pattern[at + 1 :], len(pattern)


def _padded(match: re.Match[str], piece: _Piece) -> _Piece:
    least, most = int(match["least"] or 0), int(match["most"] or 0)
    if not least and not most:
        return piece
    fill = "0" if match["zero"] else " "

    def padded(logged: _Logged) -> str:
        text = piece(logged)
        if most:
            text = text[-most:] if most > 0 else text[:-most]  # log4j cuts at the front
        return text.ljust(least) if match["left"] else text.rjust(least, fill)

    return padded


def _literal(text: str) -> _Piece:
    return lambda _logged: text


def _date(options: list[str], _told: list[str]) -> _Piece:
    pattern = options[0] if options else ""
    zone = zoneinfo.ZoneInfo(options[1]) if len(options) > 1 else None
    if pattern == "UNIX":
        return lambda logged: str(int(logged.at))
    if pattern == "UNIX_MILLIS":
        return lambda logged: str(int(logged.at * 1000))
    if zone is None and NAMED.get(pattern, pattern) == NAMED["ISO8601"]:
        return lambda logged: timestamp(logged.at)
    shown = date_format(pattern)
    return lambda logged: shown(
        dt.datetime.fromtimestamp(logged.at, zone or dt.UTC).astimezone(zone)
    )


def _logger(options: list[str], _told: list[str]) -> _Piece:
    precision = options[0] if options else ""
    return lambda logged: _abbreviated(logged.record.name, precision)


def _abbreviated(name: str, precision: str) -> str:
    """``a.b.c`` by log4j's precision: ``1`` is ``c``, ``-1`` is ``b.c``, ``1.`` is ``a.b.c``."""
    parts = name.split(".")
    if re.fullmatch(r"-?\d+", precision):
        count = int(precision)
        kept = parts[-count:] if count > 0 else parts[-count:] or parts[-1:]
        return ".".join(kept) if count else name
    if match := re.match(r"(\d+)", precision):
        return ".".join([*(part[: int(match[1])] for part in parts[:-1]), parts[-1]])
    return name


def _level(options: list[str], _told: list[str]) -> _Piece:
    named = dict(pair.strip().split("=", 1) for pair in ",".join(options).split(",") if "=" in pair)
    length = int(named.pop("length", 0)) or None
    lower = named.pop("lowerCase", "") == "true"

    def shown(logged: _Logged) -> str:
        word = level_and_thread(logged.record)[0]
        word = named.get(word, word)[:length]
        return word.lower() if lower else word

    return shown


def _message(_options: list[str], _told: list[str]) -> _Piece:
    return lambda logged: logged.message


def _exception(_options: list[str], _told: list[str]) -> _Piece:
    return lambda logged: f"\n{logged.exception}" if logged.exception else ""


def _inner(options: list[str], told: list[str]) -> _Piece:
    """A pattern inside braces; its colours are left out."""
    pieces = list(_parse(options[0], told))
    return lambda logged: "".join(piece(logged) for piece in pieces)


def _replaced(options: list[str], told: list[str]) -> _Piece:
    inner, found = _inner(options, told), re.compile(options[1])
    instead = re.sub(r"\$(\d)", r"\\\1", options[2])
    return lambda logged: found.sub(instead, inner(logged))


def _encoded(options: list[str], told: list[str]) -> _Piece:
    inner, kind = _inner(options, told), options[1] if len(options) > 1 else "HTML"
    encode = {
        "JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
        "CRLF": lambda text: text.replace("\r", "\\r").replace("\n", "\\n"),
        "HTML": _escaped,
        "XML": _escaped,
    }.get(kind)
    if encode is None:
        raise ValueError(f"{kind!r} is no way to encode")
    return lambda logged: encode(inner(logged))


def _escaped(text: str) -> str:
    return html.escape(text)


def _shortened(options: list[str], told: list[str]) -> _Piece:
    inner, most = _inner(options, told), int(options[1])
    return lambda logged: inner(logged)[:most]


def _not_empty(options: list[str], told: list[str]) -> _Piece:
    return _inner(options, told)


def _of_record(shown: Callable[[logging.LogRecord], object]) -> "_Conversion":
    return lambda _options, _told: lambda logged: str(shown(logged.record))


def _empty(_options: list[str], _told: list[str]) -> _Piece:
    return _literal("")


_Conversion = Callable[[list[str], list[str]], _Piece]
_BY_NAMES: dict[tuple[str, ...], _Conversion] = {
    ("d", "date"): _date,
    ("p", "level", "le"): _level,
    ("t", "tn", "thread", "threadName"): _of_record(lambda record: level_and_thread(record)[1]),
    ("T", "tid", "threadId"): _of_record(lambda record: record.thread or 0),
    ("c", "logger", "lo", "C", "class"): _logger,
    ("m", "msg", "message"): _message,
    ("n",): lambda _options, _told: _literal("\n"),
    ("M", "method"): _of_record(lambda record: record.funcName or ""),
    ("L", "line"): _of_record(lambda record: record.lineno),
    ("F", "file"): _of_record(lambda record: record.filename),
    ("l", "location"): _of_record(
        lambda record: f"{record.name}({record.filename}:{record.lineno})"
    ),
    ("r", "relative"): _of_record(lambda record: round((record.created - _STARTED) * 1000)),
    ("pid", "processId"): _of_record(lambda _record: os.getpid()),
    ("u", "uuid"): _of_record(lambda _record: uuid.uuid4()),
    ("ex", "throwable", "xEx", "xThrowable", "rEx", "rThrowable"): _exception,
    ("highlight", "style"): _inner,
    ("replace",): _replaced,
    ("enc", "encode"): _encoded,
    ("maxLen", "maxLength"): _shortened,
    ("notEmpty", "varsNotEmpty", "variablesNotEmpty"): _not_empty,
    # What a record of Python's has not: contexts, markers, maps.
    ("X", "mdc", "MDC", "x", "NDC", "marker", "markerSimpleName", "K", "map", "MAP"): _empty,
}
_CONVERSIONS = {name: conversion for names, conversion in _BY_NAMES.items() for name in names}
