"""Dates in Java's patterns, ``yyyy-MM-dd HH:mm:ss,SSS``, and log4j's names of patterns.

Names of days and months are English, as in TorchServe.
"""

import datetime as dt
import re
from collections.abc import Callable

#: Patterns by log4j's names. Each has a twin with a point before the milliseconds.
NAMED = {
    "": "yyyy-MM-dd HH:mm:ss,SSS",
    "DEFAULT": "yyyy-MM-dd HH:mm:ss,SSS",
    "ISO8601": "yyyy-MM-dd'T'HH:mm:ss,SSS",
    "ISO8601_BASIC": "yyyyMMdd'T'HHmmss,SSS",
    "ABSOLUTE": "HH:mm:ss,SSS",
    "DATE": "dd MMM yyyy HH:mm:ss,SSS",
}
NAMED |= {f"{name}_PERIOD": text.replace(",", ".") for name, text in NAMED.items() if name}
NAMED |= {
    "ISO8601_OFFSET_DATE_TIME_HH": "yyyy-MM-dd'T'HH:mm:ss,SSSX",
    "ISO8601_OFFSET_DATE_TIME_HHMM": "yyyy-MM-dd'T'HH:mm:ss,SSSXX",
    "ISO8601_OFFSET_DATE_TIME_HHCMM": "yyyy-MM-dd'T'HH:mm:ss,SSSXXX",
    "COMPACT": "yyyyMMddHHmmssSSS",
}

Format = Callable[[dt.datetime], str]
#: Formats a part of a moment; the number is how often its letter is repeated.
_Field = Callable[[dt.datetime, int], str]

_PIECE = re.compile(r"'((?:[^']|'')*)'|([A-Za-z])\2*|[^A-Za-z']+")


def date_format(pattern: str) -> Format:
    """Return a function that formats moments, which have a time zone.

    ``pattern`` is Java's, or one of the names in `NAMED`; raises ValueError.
    """
    pattern = NAMED.get(pattern, pattern)
    if pattern.count("'") % 2:
        raise ValueError(f"the date pattern {pattern!r} has an open quote")
    pieces = [_piece(match) for match in _PIECE.finditer(pattern)]
    return lambda moment: "".join([piece(moment) for piece in pieces])


def _piece(match: re.Match[str]) -> Format:
    text, quoted, letter = match[0], match[1], match[2]
    if letter is None:
        literal = text if quoted is None else quoted.replace("''", "'") or "'"
        return lambda _moment: literal
    if letter not in _FIELDS:
        raise ValueError(f"the letter {letter!r} of a date pattern is not known")
    field, length = _FIELDS[letter], len(text)
    return lambda moment: field(moment, length)


def _year(moment: dt.datetime, length: int) -> str:
    return f"{moment.year % 100:02d}" if length == 2 else str(moment.year).zfill(length)


def _month(moment: dt.datetime, length: int) -> str:
    if length < 3:
        return str(moment.month).zfill(length)
    return moment.strftime("%b" if length == 3 else "%B")


def _fraction(moment: dt.datetime, length: int) -> str:
    return f"{moment.microsecond:06d}000"[:length].ljust(length, "0")


def _offset(moment: dt.datetime, length: int) -> str:
    """The offset by ISO 8601: ``Z``, ``+05``, ``+0530`` or ``+05:30``."""
    text = moment.strftime("%z")
    if not moment.utcoffset():
        return "Z"
    return text[:3] if length == 1 else text if length == 2 else f"{text[:3]}:{text[3:]}"


def _number(number: Callable[[dt.datetime], int]) -> _Field:
    return lambda moment, length: str(number(moment)).zfill(length)


_FIELDS: dict[str, _Field] = {
    "d": _number(lambda moment: moment.day),
    "D": _number(lambda moment: moment.timetuple().tm_yday),
    "w": _number(lambda moment: moment.isocalendar().week),
    "H": _number(lambda moment: moment.hour),
    "k": _number(lambda moment: moment.hour or 24),
    "h": _number(lambda moment: moment.hour % 12 or 12),
    "K": _number(lambda moment: moment.hour % 12),
    "m": _number(lambda moment: moment.minute),
    "s": _number(lambda moment: moment.second),
    **dict.fromkeys("yu", _year),
    **dict.fromkeys("ML", _month),
    **dict.fromkeys("Sn", _fraction),
    **dict.fromkeys("Xx", _offset),
    "E": lambda moment, length: moment.strftime("%A" if length > 3 else "%a"),
    "a": lambda moment, _length: moment.strftime("%p"),
    "Z": lambda moment, _length: moment.strftime("%z"),
    "z": lambda moment, _length: moment.strftime("%Z"),
}
