"""Connections: a protocol of ours in front of aiohttp's, and what their clients may hold.

Every request that is not answered by the fast path (`fast_path`) is aiohttp's: its documented
low-level ``web.Server`` makes a protocol for the connection, and that protocol gets all bytes and
writes all answers through the `HttpServer`'s handler. Ours stays in front and forwards, for three
things aiohttp has no word for: the deadline of a head, the bound on open connections, and the body
of the answer to what is no HTTP. It knows where heads begin and end because it has the bytes parsed
a second time, by httptools; that costs 1 us a request and decides about deadlines only.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import httptools

from marserve.frontend.errors import BadRequest, NoWorker
from marserve.frontend.http.request_ids import new_request_id
from marserve.frontend.http.responses import (
    HttpResponse,
    error_response,
    write_response,
    write_stream,
)

if TYPE_CHECKING:
    from marserve.frontend.http.http_server import HttpServer

logger = logging.getLogger(__name__)

#: How long a connection may idle that has been used.
IDLE_SECONDS = 3630.0  # longer than reverse proxies, so that they hang up first
#: Under which name aiohttp finds the connection in what a transport tells.
CONNECTION_INFO = "marserve_connection"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Connection(asyncio.Protocol):
    """The connection of one client.

    Args:
        server: Whose client that is.

    Attributes:
        peer: Who is at the other end, for the access log.
        transport: Writes to the client.
        is_open: Whether it has not been lost.
    """

    def __init__(self, server: "HttpServer") -> None:
        self.peer = ""
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.is_open = False
        self._server = server
        self._loop = server.loop
        #: aiohttp's protocol, once the connection is aiohttp's; and where its heads begin and end:
        #: nobody knows behind garbage, or a request to upgrade.
        self._aiohttp: asyncio.Protocol | None = None
        self._heads = _HeadCounter()
        self._head_parser: httptools.HttpRequestParser | None = None
        self._answered = 0
        self._is_handling = False
        #: Since when a head is awaited that has a deadline; None while none is.
        self._head_since: float | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_writing_paused = False
        self._writable: asyncio.Future[None] | None = None

    # -- what the event loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self.transport = cast("asyncio.Transport", transport)
        if not self._server.admit(self):
            refusal = error_response(NoWorker("Too many connections."))
            self._write(refusal, "", keep_alive=False)
            self.transport.close()
            return
        self.is_open = True
        self.peer = _peer(transport)
        _probe_when_idle(transport)
        self.expect_head()
        self.begin()

    def data_received(self, data: bytes) -> None:
        """Some bytes have come: for aiohttp."""
        if self._aiohttp is not None:  # else we have hung up
            self._follow_heads(data)
            self._aiohttp.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends no more: nobody waits for its answers either, and the loop hangs up."""
        return None if self._aiohttp is None else self._aiohttp.eof_received()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._is_writing_paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has left, or we have hung up."""
        if not self.is_open:
            return
        self.is_open = False
        self._server.forget(self)
        if self._head_timer is not None:
            self._head_timer.cancel()
        self.resume_writing()
        aiohttp, self._aiohttp = self._aiohttp, None
        if aiohttp is not None:
            aiohttp.connection_lost(cast("Exception | None", exc))

    # -- whose requests these are ------------------------------------------------------------------

    def begin(self) -> None:
        """Decide what becomes of the requests of a new connection: they are aiohttp's."""
        self.hand_over(())

    def hand_over(self, pieces: Iterable[bytes]) -> None:
        """Leave the connection to aiohttp for good.

        Args:
            pieces: What has come and nobody has used yet; as it came, for what aiohttp makes of
                garbage depends on that.
        """
        self._head_parser = httptools.HttpRequestParser(self._heads)
        self._aiohttp = self._server.make_aiohttp_protocol()
        self._aiohttp.connection_made(cast("asyncio.Transport", _AiohttpTransport(self)))
        for piece in pieces:
            self.data_received(piece)

    @property
    def is_busy(self) -> bool:
        """Whether a request has come that is not answered yet."""
        return self._is_handling or self._heads.count > self._answered

    def begin_request(self) -> None:
        """Note that a request is being answered."""
        self._is_handling = True

    def end_request(self) -> None:
        """Note that its answer is written."""
        self._is_handling = False
        self._answered += 1
        if self._head_parser is None:
            self._head_since = self._loop.time()

    def _follow_heads(self, data: bytes) -> None:
        """Note which heads come in some bytes for aiohttp."""
        heads = self._heads
        if self._head_parser is not None:
            try:
                self._head_parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                self._head_parser = None
        if heads.is_in_head or self._head_parser is None:
            self.expect_head()
        elif heads.count:
            self._head_since = None

    def expect_head(self) -> None:
        """Wait for a head from now on, unless one is awaited already."""
        if self._head_since is None:
            self._head_since = self._loop.time()
        if self._head_timer is None:
            self._check_head()

    def _check_head(self) -> None:
        """Hang up if the head has not come in time; the answer to the last request comes first."""
        self._head_timer = None
        if self._head_since is None:
            return
        timeout = self._server.limits.head_timeout
        left = self._head_since + timeout - self._loop.time()
        if left <= 0 and not self.is_busy:
            logger.debug("Connection of %s is closed: no request came in time.", self.peer)
            self.transport.close()
            return
        self._head_timer = self._loop.call_later(left if left > 0 else timeout, self._check_head)

    # -- answers -----------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until a client that reads slowly has caught up."""
        if self._is_writing_paused and self.is_open:
            self._writable = self._loop.create_future()
            await self._writable

    async def send(
        self,
        answer: HttpResponse,
        request_id: str,
        *,
        keep_alive: bool,
        chunked: bool = True,
        with_body: bool = True,
    ) -> bool:
        """Write an answer.

        Args:
            answer: The answer; its stream is closed at the end.
            request_id: Of the request.
            keep_alive: Whether the connection stays if all goes well.
            chunked: Whether the client understands chunks; else a stream ends with the connection.
            with_body: Whether the client wants the body.

        Returns:
            Whether the connection stays.
        """
        keep_alive = keep_alive and answer.status < 400
        if answer.stream is None:
            self._write(answer, request_id, keep_alive=keep_alive, with_body=with_body)
            await self.drain()  # a client that sends without reading waits for itself
            return keep_alive
        return await write_stream(
            self.transport,
            self.drain,
            answer,
            request_id,
            self._server.router.common_headers,
            keep_alive=keep_alive and chunked,
            chunked=chunked,
            with_body=with_body,
        )

    def refuse_unreadable(self) -> None:
        """Answer a client whose request could not be read, and hang up."""
        if self.transport.is_closing():
            return
        router = self._server.router
        answer = error_response(BadRequest("Invalid HTTP message."))
        router.access_log.add(self.peer, "GET", "/bad-request", answer.status, 0.0)  # TorchServe's
        self._write(answer, new_request_id(), keep_alive=False)
        self.transport.close()

    def _write(
        self, answer: HttpResponse, request_id: str, *, keep_alive: bool, with_body: bool = True
    ) -> None:
        common = self._server.router.common_headers
        write_response(
            self.transport, answer, request_id, common, keep_alive=keep_alive, with_body=with_body
        )

    def end(self) -> None:
        """Hang up, since the server stops: at once, or when the request under way is answered."""
        if not self.is_busy:
            self.transport.close()


class _AiohttpTransport:
    """The transport that aiohttp sees: the client's, but for what aiohttp writes to it.

    Our handler writes its answers to the client's transport itself. So what aiohttp writes is its
    page about a request that it could not parse, and our sentence takes its place.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.transport, name)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == CONNECTION_INFO:
            return self._connection
        return self._connection.transport.get_extra_info(name, default)

    def write(self, _data: object) -> None:
        self._connection.refuse_unreadable()

    writelines = write


class _HeadCounter:
    """What httptools tells of a connection that is aiohttp's.

    Attributes:
        count: Heads that have come.
        is_in_head: Whether one has begun and not ended.
    """

    __slots__ = ("count", "is_in_head")

    def __init__(self) -> None:
        self.count = 0
        self.is_in_head = False

    def on_message_begin(self) -> None:
        self.is_in_head = True

    def on_headers_complete(self) -> None:
        self.is_in_head = False
        self.count += 1


def _probe_when_idle(transport: asyncio.BaseTransport) -> None:
    """Have the system find out about clients that have vanished."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _peer(transport: asyncio.BaseTransport) -> str:
    """``host:port``, or process and user at the other end of a unix socket."""
    name: Any = transport.get_extra_info("peername")
    if isinstance(name, tuple):
        return f"{name[0]}:{name[1]}"
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return ""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return f"unix:pid={pid},uid={uid}"
