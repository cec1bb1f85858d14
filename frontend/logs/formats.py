"""Formats of log lines: TorchServe's as text and as JSON, and log4j's JSON.

Lines of answers and metrics are finished before they are logged, many in one record: a record for
each would cost more than the answer. The attribute ``entries`` of such a record contains what its
lines were made of, for layouts with ``takes_entries``. The output of workers is logged by
records with many ``lines``, which formatters with ``takes_lines`` write, each like a record.
"""

import copy
import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from marserve.frontend.configuration.values import without_secrets

_LEVEL_NAMES = {"WARNING": "WARN", "CRITICAL": "FATAL"}  # log4j's: five letters at most
_THREAD_NAMES = {"MainThread": "main"}
_MAX_EXCERPT = 300  # characters
_PLAIN = logging.Formatter()
_quoted = json.encoder.encode_basestring


class Entry(Protocol):
    """The content of a line."""

    @property
    def at(self) -> float:
        """When, in seconds since the epoch."""

    @property
    def text(self) -> str:
        """The line after its time; without line breaks."""

    @property
    def members(self) -> Mapping[str, Any]:
        """The line as a JSON object."""


def log_entries(logger: logging.Logger, entries: Sequence[Entry], *, as_json: bool) -> None:
    """Log entries as one record, if the logger is enabled for INFO.

    The record is made without a search for the caller, which costs more than a line.
    """
    if not entries or not logger.isEnabledFor(logging.INFO):
        return
    if as_json:
        text = _json_lines(entries)
    else:
        text = "\n".join([f"{timestamp(entry.at)} - {entry.text}" for entry in entries])
    extra = {"entries": entries}
    logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None, extra=extra))


def log_lines(
    logger: logging.Logger, level: int, lines: Sequence[str], extra: Mapping[str, Any]
) -> None:
    """Log lines as one record, if the logger is enabled for the level; others read ``lines``."""
    if logger.isEnabledFor(level):
        more = {**extra, "lines": lines}
        record = logger.makeRecord(
            logger.name, level, "", 0, "\n".join(lines), (), None, extra=more
        )
        logger.handle(record)


def timestamp(epoch: float) -> str:
    """Format seconds since the epoch as in every log line: local time with milliseconds."""
    return _local_time_ms(int(epoch * 1000))


def one_line(text: object) -> str:
    """Return text of a client's or a handler's as one printable line, without secrets in URLs."""
    shown = without_secrets(str(text))
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)


def excerpt(text: object) -> str:
    """Return the beginning of a text as one line, at most 300 characters."""
    line = one_line(without_secrets(str(text))[: _MAX_EXCERPT + 1])
    return line if len(line) <= _MAX_EXCERPT else f"{line[: _MAX_EXCERPT - 3]}..."


def level_and_thread(record: logging.LogRecord) -> tuple[str, str]:
    """Return log4j's name of a record's level, and the name of its worker or else its thread."""
    level = _LEVEL_NAMES.get(record.levelname, record.levelname)
    thread = getattr(record, "worker", record.threadName) or ""
    return level, _THREAD_NAMES.get(thread, thread)


def traceback_of(record: logging.LogRecord) -> str:
    """Return the traceback of a record as text; empty if it has none."""
    if record.exc_info and not record.exc_text:
        record.exc_text = _PLAIN.formatException(record.exc_info)
    return record.exc_text or ""


class LineFormatter(logging.Formatter):
    """Formats records as ``TIME [LEVEL] thread logger - text``."""

    takes_lines = True

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """Called by logging."""
        level, thread = level_and_thread(record)
        prefix = f"{timestamp(record.created)} [{level:<5}] {thread} {record.name} - "
        lines: Sequence[str] | None = getattr(record, "lines", None)
        if lines is None:
            return f"{prefix}{record.message}"
        return prefix + f"\n{prefix}".join(lines)


class JsonFormatter(logging.Formatter):
    """Formats records as JSON objects, one per line."""

    takes_lines = True

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        level, thread = level_and_thread(record)
        members = {
            "time": timestamp(record.created),
            "level": level,
            "thread": thread,
            "logger": record.name,
        }
        lines: Sequence[str] | None = getattr(record, "lines", None)
        if lines is not None:
            head = f'{json.dumps(members, ensure_ascii=False)[:-1]}, "message": '
            return "\n".join([f"{head}{_quoted(line)}}}" for line in lines])
        members["message"] = record.getMessage()
        if text := traceback_of(record):
            members["exception"] = text
        return json.dumps(members, ensure_ascii=False)


class MetricLayout(JsonFormatter):
    """TorchServe's JSONPatternLayout: metrics as JSON objects."""

    takes_entries = True

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        entries = getattr(record, "entries", None)
        return super().format(record) if entries is None else _json_lines(entries)


class EntryFormatter(logging.Formatter):
    """Base of log4j's layouts, which format each line of a record by itself."""

    takes_entries = True

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        entries: Sequence[Entry] | None = getattr(record, "entries", None)
        if entries is None:
            return self.format_line(record)
        line, lines = copy.copy(record), []
        for entry in entries:
            line.created, line.msg = entry.at, entry.text
            lines.append(self.format_line(line))
        return "\n".join(lines)

    def format_line(self, record: logging.LogRecord) -> str:
        """Return the text of a record that is one line."""
        raise NotImplementedError


class JsonLayout(EntryFormatter):
    """log4j's JsonLayout with each object on one line, and with ``more`` members.

    The time is ``timeMillis`` if ``includes_millis``, else ``instant``.
    """

    def __init__(
        self, more: Mapping[str, str] | None = None, *, includes_millis: bool = False
    ) -> None:
        super().__init__()
        self._more = dict(more or {})
        self._includes_millis = includes_millis

    def format_line(self, record: logging.LogRecord) -> str:
        """Return a record as a JSON object."""
        level, thread = level_and_thread(record)
        seconds, rest = divmod(int(record.created * 1_000_000), 1_000_000)
        members: dict[str, Any] = {"instant": {"epochSecond": seconds, "nanoOfSecond": rest * 1000}}
        if self._includes_millis:
            members = {"timeMillis": int(record.created * 1000)}
        members |= {
            "thread": thread,
            "level": level,
            "loggerName": record.name,
            "message": record.getMessage(),
        }
        if text := traceback_of(record):
            members["thrown"] = {"extendedStackTrace": text}
        return json.dumps({**members, **self._more}, ensure_ascii=False)


def _json_lines(entries: Sequence[Entry]) -> str:
    return "\n".join(json.dumps(entry.members, ensure_ascii=False) for entry in entries)


@lru_cache(maxsize=4)  # many lines are of the same moment
def _local_time_ms(epoch_ms: int) -> str:
    seconds, milliseconds = divmod(epoch_ms, 1000)
    return f"{_local_time(seconds)},{milliseconds:03d}"


@lru_cache(maxsize=16)
def _local_time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))
