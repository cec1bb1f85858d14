"""The access log: counts each response and writes a line for it, many lines at a time."""

import asyncio
import logging
import time
from typing import Any, NamedTuple

from marserve.frontend.logs.formats import log_entries, timestamp
from marserve.frontend.telemetry.metrics import Metrics

logger = logging.getLogger("ACCESS_LOG")

_FLUSH_SECONDS = 0.5
# Few, since they are formatted in the event loop.
_FLUSH_LINES = 256


class _Entry(NamedTuple):
    at: float
    peer: str
    method: str
    target: str
    status: int
    seconds: float
    protocol: str = "HTTP/1.1"

    @property
    def text(self) -> str:
        # A request line contains no line break, but may contain control characters.
        target = self.target if self.target.isprintable() else ascii(self.target)[1:-1]
        milliseconds = round(self.seconds * 1000)
        return f'/{self.peer} "{self.method} {target} {self.protocol}" {self.status} {milliseconds}'

    @property
    def members(self) -> dict[str, Any]:
        return {
            "time": timestamp(self.at),
            "peer": self.peer,
            "method": self.method,
            "path": self.target,
            "status": self.status,
            "milliseconds": round(self.seconds * 1000),
        }


class AccessLog:
    """Counts the responses of a listener and collects their lines, as text or JSON objects."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, metrics: Metrics, *, as_json: bool = False
    ) -> None:
        self._loop = loop
        self._count_response = metrics.count_response
        self._as_json = as_json
        self._entries: list[_Entry] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, peer: str, method: str, target: str, status: int, seconds: float) -> None:
        """Count and log a response; ``peer`` is its client, as ``host:port``."""
        self._count_response(status)
        self._append(_Entry(time.time(), peer, method, target, status, seconds))

    def add_call(self, peer: str, method: str, code: int, http_status: int, seconds: float) -> None:
        """Log a gRPC call by its status code, and count it by the equivalent HTTP status.

        ``method`` is its full name, ``package.Service/Method``.
        """
        self._count_response(http_status)
        self._append(_Entry(time.time(), peer, "gRPC", method, code, seconds, "HTTP/2.0"))

    def _append(self, entry: _Entry) -> None:
        self._entries.append(entry)
        if self._timer is None:
            self._timer = self._loop.call_later(_FLUSH_SECONDS, self.flush)
        elif len(self._entries) >= _FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Write the collected lines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        entries, self._entries = self._entries, []
        log_entries(logger, entries, as_json=self._as_json)
