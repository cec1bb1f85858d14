"""The access log: counts each response, and writes its line when it is sent, or soon (`pace`).

A line is TorchServe's. Behind it are the model of a gRPC call; if the client has sent an
``X-Request-Id``, that id and the server's own; and the id of the request's trace, if it has one.
JSON always has the server's own id.
"""

import asyncio
import logging
import re
import time
from functools import partial
from typing import Any, NamedTuple

from marserve.frontend.logs.formats import log_entries, timestamp
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.pace import Pace
from marserve.frontend.telemetry.trace_context import RequestTrace

logger = logging.getLogger("ACCESS_LOG")

CLIENT_ID_HEADER = "x-request-id"

# Few, since they are formatted in the event loop.
_FLUSH_LINES = 256
_MAX_MODEL = 200  # characters of a name
_CLIENT_ID = re.compile("[!-~]{1,128}")  # visible ASCII


class _Entry(NamedTuple):
    at: float
    peer: str
    method: str
    target: str
    status: int
    seconds: float
    request_id: str
    client_id: str | None
    trace: RequestTrace | None = None
    protocol: str = "HTTP/1.1"
    model: str = ""

    @property
    def text(self) -> str:
        more = "".join([f" {name}={value}" for name, value in self._more.items()])
        request = f"{self.method} {self.target} {self.protocol}"
        line = f'/{self.peer} "{request}" {self.status} {round(self.seconds * 1000)}{more}'
        # It contains no line break of HTTP, but may contain control characters.
        return line if line.isprintable() else ascii(line)[1:-1]

    @property
    def members(self) -> dict[str, Any]:
        return {
            "time": timestamp(self.at),
            "peer": self.peer,
            "method": self.method,
            "path": self.target,
            "status": self.status,
            "milliseconds": round(self.seconds * 1000),
            **({"request_id": self.request_id} if self.request_id else {}),
            **self._more,
        }

    @property
    def _more(self) -> dict[str, str]:
        more = {"model": self.model[:_MAX_MODEL]} if self.model else {}
        if self.client_id and _CLIENT_ID.fullmatch(self.client_id):
            more |= {"request_id": self.request_id, "client_request_id": self.client_id}
        trace_id = "" if self.trace is None else self.trace.trace_id
        return more | {"trace_id": trace_id} if trace_id else more


class AccessLog:
    """Counts the responses of a listener and collects their lines, as text or JSON objects."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, metrics: Metrics, *, as_json: bool = False
    ) -> None:
        self._count_response = metrics.count_response
        self._as_json = as_json
        self._entries: list[_Entry] = []
        # After the answer, which need not wait for a write to the disk.
        self._pace = Pace(partial(loop.call_soon, self.flush), loop.time)

    def add(
        self,
        peer: str,
        method: str,
        target: str,
        status: int,
        seconds: float,
        request_id: str = "",
        client_id: str | None = None,
        trace: RequestTrace | None = None,
    ) -> None:
        """Count and log a response; ``peer`` is its client, as ``host:port``."""
        self._count_response(status)
        ids = request_id, client_id, trace
        self._append(_Entry(time.time(), peer, method, target, status, seconds, *ids))

    def add_call(
        self,
        peer: str,
        method: str,
        code: int,
        http_status: int,
        seconds: float,
        request_id: str = "",
        client_id: str | None = None,
        model: str = "",
        trace: RequestTrace | None = None,
    ) -> None:
        """Log a gRPC call by its status code, and count it by the equivalent HTTP status.

        ``method`` is its full name, ``package.Service/Method``.
        """
        self._count_response(http_status)
        ids = request_id, client_id, trace
        self._append(
            _Entry(time.time(), peer, "gRPC", method, code, seconds, *ids, "HTTP/2.0", model)
        )

    def _append(self, entry: _Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) >= _FLUSH_LINES:
            self.flush()
        else:
            self._pace.answered()

    def flush(self) -> None:
        """Write the collected lines."""
        entries, self._entries = self._entries, []
        log_entries(logger, entries, as_json=self._as_json)
