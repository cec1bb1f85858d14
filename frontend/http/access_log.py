"""The access log: counts each response, and writes a line for each, many at a time.

Lines are collected for a moment and go to the logger ``ACCESS_LOG`` as one record. The timer runs
only while there is something to write.
"""

import asyncio
import logging
import socket
import struct
import time
from typing import Any, NamedTuple

from marserve.frontend.logs.formats import log_entries, timestamp
from marserve.frontend.telemetry.metrics import Metrics

logger = logging.getLogger("ACCESS_LOG")

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_FLUSH_SECONDS = 0.5
# Few, because the event loop stands still while they are formatted.
_FLUSH_LINES = 256


class _Entry(NamedTuple):
    at: float
    peer: str
    method: str
    target: str
    status: int
    seconds: float

    @property
    def text(self) -> str:
        """See `formats.Entry`."""
        # A request line cannot hold a line break, but a control character would still deface it.
        target = self.target if self.target.isprintable() else ascii(self.target)[1:-1]
        milliseconds = round(self.seconds * 1000)
        return f'/{self.peer} "{self.method} {target} HTTP/1.1" {self.status} {milliseconds}'

    @property
    def members(self) -> dict[str, Any]:
        """See `formats.Entry`."""
        return {
            "time": timestamp(self.at),
            "peer": self.peer,
            "method": self.method,
            "path": self.target,
            "status": self.status,
            "milliseconds": round(self.seconds * 1000),
        }


class AccessLog:
    """Counts the responses of a listener and collects their lines.

    Each line is text as TorchServe's, or a JSON object.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, metrics: Metrics, *, as_json: bool = False
    ) -> None:
        self._loop = loop
        self._count_response = metrics.count_response
        self._as_json = as_json
        self._entries: list[_Entry] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, peer: str, method: str, target: str, status: int, seconds: float) -> None:
        """Count and log a response; ``peer`` is its client, by `peer_name`."""
        self._count_response(status)
        self._entries.append(_Entry(time.time(), peer, method, target, status, seconds))
        if self._timer is None:
            self._timer = self._loop.call_later(_FLUSH_SECONDS, self.flush)
        elif len(self._entries) >= _FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        entries, self._entries = self._entries, []
        log_entries(logger, entries, as_json=self._as_json)


def peer_host(transport: asyncio.BaseTransport) -> str:
    """The address at the other end, without its port; empty behind a unix socket."""
    name: Any = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""


def peer_name(transport: asyncio.BaseTransport) -> str:
    """Who is at the other end: ``host:port``, or process and user behind a unix socket."""
    name: Any = transport.get_extra_info("peername")
    if isinstance(name, tuple):
        return f"{name[0]}:{name[1]}"
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return ""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return f"unix:pid={pid},uid={uid}"
