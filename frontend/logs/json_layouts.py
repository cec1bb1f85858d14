"""log4j's layouts in JSON, each object on one line."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from marserve.frontend.logs.lines import json_line
from marserve.frontend.logs.setup import JsonFormatter, level_and_thread


class JsonLayout(logging.Formatter):
    """The members of log4j's JsonLayout.

    Args:
        more: Members that every object has besides.
        includes_millis: Whether the time is ``timeMillis`` instead of ``instant``.
    """

    def __init__(
        self, more: Mapping[str, str] | None = None, *, includes_millis: bool = False
    ) -> None:
        super().__init__()
        self._more = dict(more or {})
        self._includes_millis = includes_millis

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        entries = getattr(record, "entries", None)
        if entries is not None:
            return "\n".join(self._line(record, one.at, one.text) for one in entries)
        return self._line(record, record.created, record.getMessage())

    def _line(self, record: logging.LogRecord, at: float, message: str) -> str:
        level, thread = level_and_thread(record)
        seconds, rest = divmod(int(at * 1_000_000), 1_000_000)
        time: dict[str, Any] = {"instant": {"epochSecond": seconds, "nanoOfSecond": rest * 1000}}
        if self._includes_millis:
            time = {"timeMillis": int(at * 1000)}
        members = {
            **time,
            "thread": thread,
            "level": level,
            "loggerName": record.name,
            "message": message,
        }
        if record.exc_info:
            members["thrown"] = {"extendedStackTrace": self.formatException(record.exc_info)}
        return json.dumps({**members, **self._more}, ensure_ascii=False)


class MetricLayout(JsonFormatter):
    """TorchServe's JSONPatternLayout: metrics by their members."""

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        entries = getattr(record, "entries", None)
        return super().format(record) if entries is None else "\n".join(map(json_line, entries))
