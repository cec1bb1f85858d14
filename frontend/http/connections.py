"""Connections of clients: deadlines of heads, answers, and a protocol in front of aiohttp's.

Requests that the fast path (`fast_path`) does not answer are aiohttp's: its low-level
``web.Server`` makes a protocol, which gets all bytes and calls the handler of `HttpServer`. The
protocol in front of it limits open connections, gives heads a deadline, and answers what is not
HTTP with an error body like all others. For the deadlines it parses heads a second time, with
httptools, which costs 1 us a request.
"""

import asyncio
import logging
import socket
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import httptools

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Stream, StreamBroken
from marserve.frontend.errors import BadRequest, NoWorker
from marserve.frontend.http.peers import peer_host, peer_name
from marserve.frontend.http.responses import (
    STATUSES_WITHOUT_BODY,
    HttpResponse,
    error_response,
    response_head,
)
from marserve.frontend.security.usage import ClientUsage, Holding
from marserve.frontend.serving.request_ids import new_request_id

if TYPE_CHECKING:
    from marserve.frontend.aio.long_work import LongWork
    from marserve.frontend.http.http_server import ConnectionLimits, HttpServer

logger = logging.getLogger(__name__)

#: How long a connection may be idle after its first request.
IDLE_SECONDS = 3630.0  # longer than reverse proxies, so that they hang up first
#: The name by which our handler finds the connection in the information about aiohttp's transport.
CONNECTION_INFO = "marserve_connection"
# Up to so many bytes, copying a body behind its head costs less than writing the two.
_MAX_JOINED_BYTES = 64 * 1024


class Connection(asyncio.Protocol):
    """The connection of one client.

    Attributes:
        client: What all connections from the client's address use.
        transport: Writes to the client.
        peer: The client's address, for the access log.
        is_open: Whether the connection was admitted and is not lost.
    """

    # Defaults of what few connections set: Python reads more than 30 attributes more slowly.
    #: Counted in the server's usage: bytes of answers that wait for the client.
    _unread = 0
    _answer_stream: Stream | None = None
    #: How many bytes have come behind the head of a request that asks for an upgrade; None if there
    #: is no such request.
    _behind_upgrade: int | None = None

    def __init__(self, server: "HttpServer") -> None:
        self._usage = server.usage
        self.client: ClientUsage
        self.transport: asyncio.Transport
        self.peer = ""
        self.is_open = False
        self._server = server
        self._router = server.router
        self._loop = server.loop
        #: Set while the client reads as fast as we write.
        self._writable = asyncio.Event()
        self._writable.set()
        #: Counted in the server's usage: bytes of the current request.
        self._held = 0
        #: aiohttp's protocol, once the connection is aiohttp's.
        self._aiohttp: asyncio.Protocol | None = None
        #: Where its heads begin and end; the parser is None behind garbage or an upgrade.
        self._heads = _HeadCounter()
        self._head_parser: httptools.HttpRequestParser | None = None
        self._answered = 0
        self._is_handling = False
        #: Since when a head with a deadline has been due; None while none is.
        self._head_since: float | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def limits(self) -> "ConnectionLimits":
        """What the client may use."""
        return self._server.limits

    @property
    def long_work(self) -> "LongWork":
        """Parses what takes long."""
        return self._server.long_work

    # -- what the event loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected; over TLS it was admitted before the handshake."""
        sock = transport.get_extra_info("socket")
        if not self.is_open and not self.admit(transport, sock):
            self.write(error_response(NoWorker("Too many connections.")), "", keep_alive=False)
            self.close()
            return
        self.transport = cast("asyncio.Transport", transport)
        self.peer = peer_name(transport)
        _enable_keepalive(transport)
        self.expect_head()
        self.begin()

    def admit(self, transport: asyncio.BaseTransport, sock: socket.socket) -> bool:
        """Count the connection, with the descriptor of ``sock``, if the limits allow one more."""
        self.transport = cast("asyncio.Transport", transport)
        self.client = self._usage.client(peer_host(transport))
        self.is_open = self._server.admit(self, sock.fileno())
        return self.is_open

    def data_received(self, data: bytes) -> None:
        """Pass bytes on to aiohttp."""
        if self._aiohttp is not None:  # else we have hung up
            self._follow_heads(data)
            self._aiohttp.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends no more; the loop then closes the connection, answered or not."""
        return None if self._aiohttp is None else self._aiohttp.eof_received()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._writable.clear()
        self.count_unread()
        self._server.slow_readers.watch(self)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writable.set()
        if not self.transport.is_closing():  # else it has to take the rest, too
            self._server.slow_readers.forget(self)
        if self._unread:
            self._usage.add(self.client, -self._unread)
            self._unread = 0

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has left, or we have hung up."""
        self._server.slow_readers.forget(self)
        self._server.absent_clients.forget(self.transport)
        self.release()
        self.resume_writing()
        if not self.is_open:
            return
        self.is_open = False
        self._server.remove(self)
        if self._head_timer is not None:
            self._head_timer.cancel()
        aiohttp, self._aiohttp = self._aiohttp, None
        if aiohttp is not None:
            aiohttp.connection_lost(cast("Exception | None", exc))

    # -- requests ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to read requests: here, by leaving them to aiohttp."""
        self.hand_over(())

    def hand_over(self, pieces: Iterable[bytes]) -> None:
        """Leave the connection to aiohttp for good.

        Args:
            pieces: Bytes that have come and are not used yet; in the pieces in which they came, for
                aiohttp's answer to garbage depends on that.
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

    def decline_upgrade(self, body_bytes: int) -> bool:
        """Go on after a request that asked for an upgrade, none of which is ever taken.

        Returns:
            Whether the connection may stay: not if more than the request has come. aiohttp loses
            that, and the client would take the next answer for the one to what is lost.
        """
        if self._behind_upgrade is None:
            return True
        if self._behind_upgrade > body_bytes:
            return False
        self._behind_upgrade = None
        self._head_parser = httptools.HttpRequestParser(self._heads)
        return True

    def end_request(self) -> None:
        """Note that its answer is written."""
        self.release()
        self._is_handling = False
        self._answered += 1
        if self._head_parser is None:
            self._head_since = self._loop.time()

    def end(self) -> None:
        """Hang up, since the server stops: at once, or when the current request is answered."""
        if not self.is_busy:
            self.close()

    def close(self) -> None:
        """Hang up when everything is written; the client has to take it in time."""
        if not self.transport.is_closing():
            self.transport.close()
            self._server.slow_readers.watch(self)

    def pause_reading(self) -> None:
        """Read no more for now; but notice if the client leaves."""
        self.transport.pause_reading()
        self._server.absent_clients.watch(self.transport)

    def resume_reading(self) -> None:
        """Read again."""
        self._server.absent_clients.forget(self.transport)
        self.transport.resume_reading()

    # -- what the client uses ----------------------------------------------------------------------

    def hold(self, count: int) -> None:
        """Count bytes of the current request as in flight; see `Usage.hold`."""
        if self.is_open:
            self._usage.hold(self.client, count)
            self._held += count

    def holding(self) -> Holding:
        """For what is in memory for a request, beside its body."""
        return Holding(self._usage, self.client)

    @property
    def share_in_flight(self) -> float:
        """See `Usage.share`."""
        return self._usage.share(self.client)

    def release(self) -> None:
        """Count the bytes of the current request as no longer in flight."""
        if self._held:
            self._usage.add(self.client, -self._held)
            self._held = 0

    def count_unread(self) -> None:
        """Count what waits for the client to read it."""
        unread = self.transport.get_write_buffer_size()
        if self._answer_stream is not None:
            unread += self._answer_stream.waiting_bytes
        self._usage.add(self.client, unread - self._unread)
        self._unread = unread

    def check_unread(self) -> None:
        """`count_unread` of a slow reader; its stream must not fill the memory."""
        self.count_unread()
        if self._answer_stream is not None and self._usage.is_full:
            self._break_off("the client is too slow, and too much is in flight")

    def give_up(self) -> None:
        """Disconnect a client that does not take its answer."""
        limits = self.limits
        self._server.note_limit(
            "response_write_timeout",
            f"Clients that do not read their answers are disconnected, such as {self.peer}.",
        )
        logger.debug(
            "Connection of %s is closed: it took no bytes of an answer for %g s, or less than %d "
            "per second.",
            *(self.peer, limits.write_timeout, limits.write_rate),
        )
        self.transport.abort()

    # -- deadlines of heads ------------------------------------------------------------------------

    def _follow_heads(self, data: bytes) -> None:
        """Note which heads begin and end in bytes for aiohttp."""
        heads = self._heads
        if self._head_parser is not None:
            try:
                self._head_parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._head_parser = None
                self._behind_upgrade = len(data) - upgrade.args[0]
            except httptools.HttpParserError:
                self._head_parser = None
        elif self._behind_upgrade is not None:
            self._behind_upgrade += len(data)
        if heads.is_in_head or self._head_parser is None:
            self.expect_head()
        elif heads.count:
            self._head_since = None

    def expect_head(self) -> None:
        """Begin the deadline of a head, unless it has begun already."""
        if self._head_since is None:
            self._head_since = self._loop.time()
        if self._head_timer is None:
            self._check_head()

    def _check_head(self) -> None:
        """Hang up if the head has not come in time; the answer to the last request goes first."""
        self._head_timer = None
        if self._head_since is None:
            return
        timeout = self.limits.head_timeout
        left = self._head_since + timeout - self._loop.time()
        if left <= 0 and not self.is_busy:
            logger.debug("Connection of %s is closed: no request came in time.", self.peer)
            self.close()
            return
        self._head_timer = self._loop.call_later(left if left > 0 else timeout, self._check_head)

    # -- answers -----------------------------------------------------------------------------------

    def write(
        self,
        answer: HttpResponse | Prediction,
        request_id: str,
        *,
        keep_alive: bool,
        with_body: bool = True,
    ) -> None:
        """Write an answer that is no stream; without its body for a HEAD request."""
        transport = self.transport
        if transport.is_closing():  # uvloop refuses to write
            return
        status, body = answer.status, answer.body
        framing = "" if status == 204 else f"content-length: {len(body)}\r\n"
        common = self._router.common_headers
        head = response_head(answer, request_id, common, framing, keep_alive=keep_alive)
        if not body or not with_body or status in STATUSES_WITHOUT_BODY:
            transport.write(head)  # a client would take a body for the next answer
        elif len(body) <= _MAX_JOINED_BYTES:
            transport.write(head + body)
        elif transport.get_extra_info("sslcontext") is None:
            transport.writelines([head, body])
        else:
            # What is written with TLS in one piece is hidden in uvloop's transport below, which
            # has no limit, and we are never asked to pause.
            transport.write(head)
            for start in range(0, len(body), _MAX_JOINED_BYTES):
                transport.write(memoryview(body)[start : start + _MAX_JOINED_BYTES])

    async def send(
        self,
        answer: HttpResponse,
        request_id: str,
        *,
        keep_alive: bool,
        chunked: bool = True,
        with_body: bool = True,
    ) -> bool:
        """Write an answer, and wait until the client has read most of it.

        Args:
            answer: Its stream, if any, is closed at the end.
            request_id: Of the request.
            keep_alive: Whether the connection stays if all goes well.
            chunked: Whether the client understands chunks; else a stream ends with the connection.
            with_body: False for a HEAD request.

        Returns:
            Whether the connection stays.
        """
        keep_alive = keep_alive and answer.status < 400
        if answer.stream is None:
            self.write(answer, request_id, keep_alive=keep_alive, with_body=with_body)
            await self._writable.wait()  # a client that does not read gets no further answer
            return keep_alive
        stream, transport = answer.stream, self.transport
        has_body = answer.status not in STATUSES_WITHOUT_BODY
        framing = "transfer-encoding: chunked\r\n" if chunked and has_body else ""
        has_body, keep_alive = has_body and with_body, keep_alive and chunked
        common = self._router.common_headers
        self._answer_stream = stream
        stream.on_behind = partial(self._break_off, "the client is too slow")
        try:
            if not transport.is_closing():
                head = response_head(answer, request_id, common, framing, keep_alive=keep_alive)
                transport.write(head)
            return await self._write_pieces(stream, has_body, chunked) and keep_alive
        except StreamBroken as error:
            # Without the last chunk, so that the client does not take the answer for complete.
            self._break_off(str(error))
            return False
        finally:
            self._answer_stream = None
            stream.close()

    async def _write_pieces(self, stream: Stream, has_body: bool, chunked: bool) -> bool:
        """Write the body of a streamed answer; return whether the connection was open till then."""
        transport = self.transport
        async for piece in stream.pieces():
            if transport.is_closing():  # uvloop refuses to write
                return False
            if piece and has_body:
                chunk = (b"%x\r\n" % len(piece), piece, b"\r\n") if chunked else (piece,)
                transport.writelines(chunk)
                await self._writable.wait()
        if chunked and has_body and not transport.is_closing():
            transport.write(b"0\r\n\r\n")
        return True

    def _break_off(self, reason: str) -> None:
        if not self.transport.is_closing():
            logger.warning("An answer was broken off: %s", reason)
            self.transport.abort()

    def refuse_unreadable(self) -> None:
        """Answer a client whose request could not be parsed, and hang up."""
        if self.transport.is_closing():
            return
        answer = error_response(BadRequest("Invalid HTTP message."))
        # Method and path are those of TorchServe's access log.
        self._router.access_log.add(self.peer, "GET", "/bad-request", answer.status, 0.0)
        self.write(answer, new_request_id(), keep_alive=False)
        self.close()


class _AiohttpTransport:
    """The transport that aiohttp gets: the client's, except for what the connection has to know of.

    Our handler writes its answers to the client's transport itself. So whatever aiohttp writes is
    its page about a request that it could not parse, and our error body takes its place.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.transport, name)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == CONNECTION_INFO:
            return self._connection
        return self._connection.transport.get_extra_info(name, default)

    def close(self) -> None:
        self._connection.close()

    def pause_reading(self) -> None:
        self._connection.pause_reading()

    def resume_reading(self) -> None:
        self._connection.resume_reading()

    def write(self, _data: object) -> None:
        self._connection.refuse_unreadable()

    writelines = write


class _HeadCounter:
    """Callbacks of httptools: how many heads have come, and whether one has begun but not ended."""

    __slots__ = ("count", "is_in_head")

    def __init__(self) -> None:
        self.count = 0
        self.is_in_head = False

    def on_message_begin(self) -> None:
        self.is_in_head = True

    def on_headers_complete(self) -> None:
        self.is_in_head = False
        self.count += 1


def _enable_keepalive(transport: asyncio.BaseTransport) -> None:
    """Have the system find out about clients that have vanished."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
