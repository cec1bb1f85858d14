"""Patterns of log4j's, as they lay out a record."""

import logging

from fuzz.limits import Limits

from marserve.frontend.logs.patterns import PatternFormatter

LIMITS = Limits(calls=3_000, calls_per_byte=100)
_RECORD = logging.LogRecord("a.b.c", logging.INFO, "file.py", 7, "said %s", ("this",), None)


def target(data: bytes) -> None:
    """A pattern formats a record, whatever it is; remarks tell of what has no meaning."""
    formatter = PatternFormatter(data.decode("utf-8", "replace"))
    formatter.format(_RECORD)
