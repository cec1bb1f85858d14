"""The HTTP server of a listener, fed by an event loop's calls instead of a socket's.

A transport in memory makes an exchange the same in each execution, and ten times as fast.
"""

import asyncio
import functools
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fakes import VirtualLoop, drain_loop

from marserve.frontend.http.http_server import HttpServer
from marserve.frontend.http.router import Route, Router
from marserve.frontend.security.guard import Guard
from marserve.frontend.telemetry.access_log import AccessLog
from marserve.frontend.telemetry.metrics import Metrics

_ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# Of the loop, from one piece to the next.
_STEPS = 4
_MAX_SECONDS = 100_000.0  # of virtual time: longer than every deadline of a connection


@dataclass(frozen=True)
class Exchange:
    """What came of a connection: bytes, requests as the access log has them, and when it ended."""

    received: bytes
    requests: tuple[tuple[str, str, int], ...]
    seconds: float
    longest_step: float  # CPU seconds for which nothing else could run


class _Transport(asyncio.Transport):
    """Keeps what is written; a client that reads at once."""

    def __init__(self, protocol: asyncio.Protocol, connection: socket.socket) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "socket": connection})
        self.received = bytearray()
        self.closed = asyncio.Event()
        self._protocol = protocol
        self._is_closing = False
        self.reading = asyncio.Event()
        self.reading.set()

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self.received += data

    def writelines(self, pieces: Iterable[Any]) -> None:
        self.write(b"".join(pieces))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.reading.set()
            asyncio.get_running_loop().call_soon(self._end)

    abort = close

    def _end(self) -> None:
        self.closed.set()
        self._protocol.connection_lost(None)

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.reading.clear()

    def resume_reading(self) -> None:
        self.reading.set()

    def is_reading(self) -> bool:
        return self.reading.is_set()

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def can_write_eof(self) -> bool:
        return False


def exchange(
    pieces: Iterable[bytes], routes: Mapping[str, Route], *, fast_path: bool = True
) -> Exchange:
    """Send pieces to a listener with these routes, and wait until it hangs up, in virtual time."""
    loop = VirtualLoop()
    try:
        # Nothing is sent there: it is only asked how much is left to send.
        with mock.patch("time.monotonic", loop.time), socket.socket(socket.AF_UNIX) as connection:
            result: Exchange = loop.run(_exchange(pieces, routes, fast_path, connection))
    finally:
        loop.close()
    return result


async def _exchange(
    pieces: Iterable[bytes],
    routes: Mapping[str, Route],
    fast_path: bool,
    connection: socket.socket,
) -> Exchange:
    loop = asyncio.get_running_loop()
    log = _RecordedLog(loop, _metrics())
    router = Router(routes, guard=Guard(None), access_log=log, common_headers="")
    server = HttpServer(router, fast_path=fast_path)
    protocol = server()
    transport = _Transport(protocol, connection)
    began, longest = loop.time(), 0.0
    protocol.connection_made(transport)
    for piece in pieces:
        if transport.is_closing():
            break
        step = time.thread_time()
        protocol.data_received(piece)
        for _ in range(_STEPS):
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, step = max(longest, now - step), now
        await transport.reading.wait()
    async with asyncio.timeout(_MAX_SECONDS):
        await transport.closed.wait()
    seconds = loop.time() - began
    await server.close(0.5)
    log.flush()
    await drain_loop()
    received = _ID.sub(b"ID", transport.received)
    return Exchange(received, tuple(log.requests), seconds, longest)


@functools.cache
def _metrics() -> Metrics:
    return Metrics("host")  # reads a file


class _RecordedLog(AccessLog):
    """Remembers what it is told."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests: list[tuple[str, str, int]] = []

    def add(self, peer: str, method: str, target: str, status: int, *more: Any) -> None:
        self.requests.append((method, target, status))
        super().add(peer, method, target, status, *more)
