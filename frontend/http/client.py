"""The connection of a client without its requests: admission, flow control and answers."""

import asyncio
import logging
import socket
import struct
from functools import partial
from typing import Any, cast

from marserve.backend.protocol import Buffer, Prediction
from marserve.frontend.batching.jobs import Stream, StreamBroken
from marserve.frontend.http.limits import ConnectionLimits, Connections
from marserve.frontend.http.responses import STATUSES_WITHOUT_BODY, HttpResponse, response_head
from marserve.frontend.security.usage import ClientUsage, RequestMemory

logger = logging.getLogger(__name__)

# Up to this size, copying a body behind its head costs less than writing the two.
_MAX_JOINED_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class ClientConnection(asyncio.Protocol):
    """The connection of one client: admission, bytes in flight, flow control and answers."""

    # Class attributes for what few connections set: Python reads an object with more than 30
    # attributes more slowly.
    #: Counted in the usage: bytes of answers that the client has not read.
    _unread = 0
    #: Bytes of the large body that is being written. The transport keeps all of it until the end.
    _writing = 0
    #: Whether the client was asked to send the body of the current request.
    has_continued = False
    _answer_stream: Stream | None = None

    def __init__(self, connections: Connections, common_headers: str) -> None:
        self._connections = connections
        self._usage = connections.usage
        self._loop = connections.loop
        self._common_headers = common_headers
        self.client: ClientUsage
        self.memory: RequestMemory  # of the current request
        self.transport: asyncio.Transport
        self.peer = ""  # for the access log
        self.is_open = False  # admitted and not lost
        self._writable = asyncio.Event()  # set while the client reads as fast as we write
        self._writable.set()

    @property
    def limits(self) -> ConnectionLimits:
        """What the client may use."""
        return self._connections.limits

    # -- admission and end -------------------------------------------------------------------------

    def admit(self, transport: asyncio.BaseTransport, sock: socket.socket) -> bool:
        """Count the connection, with the descriptor of ``sock``, if the limits allow one more."""
        self.transport = cast("asyncio.Transport", transport)
        self.client = self._usage.client(_peer_host(transport))
        self.memory = RequestMemory(self._usage, self.client)
        self.is_open = self._connections.admit(self, sock.fileno())
        return self.is_open

    def _release_all(self) -> None:
        self._connections.slow_readers.forget(self)
        self._connections.absent_clients.forget(self.transport)
        self.memory.close()
        self.resume_writing()
        if self.is_open:
            self.is_open = False
            self._connections.remove(self)

    def end(self) -> None:
        """Close the connection because the server stops."""
        self.close()

    def close(self) -> None:
        """Close the connection when everything is written; the client must read it in time."""
        if not self.transport.is_closing():
            self.transport.close()
            self._connections.slow_readers.watch(self)

    # -- flow control ------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Stop reading, but notice if the client leaves."""
        self.transport.pause_reading()
        self._connections.absent_clients.watch(self.transport)

    def resume_reading(self) -> None:
        """Read again."""
        self._connections.absent_clients.forget(self.transport)
        self.transport.resume_reading()

    def pause_writing(self) -> None:
        """Wait with further answers: the client reads more slowly than we write."""
        self._writable.clear()
        self.count_unread()
        self._connections.slow_readers.watch(self)

    def resume_writing(self) -> None:
        """Write again: the client has read nearly everything."""
        self._writable.set()
        self._writing = 0
        if not self.transport.is_closing():  # else it must read the rest, too
            self._connections.slow_readers.forget(self)
        if self._unread:
            self._usage.add(self.client, -self._unread)
            self._unread = 0

    # -- answers that are not read -----------------------------------------------------------------

    @property
    def share_in_flight(self) -> float:
        """The share of the allowed bytes in flight that is used, 0 to 1."""
        return self._usage.share(self.client)

    def count_unread(self) -> None:
        """Count the bytes that wait for the client to read them."""
        unread = max(self.transport.get_write_buffer_size(), self._writing)
        if self._answer_stream is not None:
            unread += self._answer_stream.waiting_bytes
        self._usage.add(self.client, unread - self._unread)
        self._unread = unread

    def check_unread(self) -> None:
        """Count the unread bytes of a slow reader; break its stream off if memory is full."""
        self.count_unread()
        if self._answer_stream is not None and self._usage.is_full:
            self._break_off("the client is too slow, and too much is in flight")

    def give_up(self) -> None:
        """Disconnect a client that does not read its answer."""
        limits = self.limits
        self._connections.note_limit(
            "response_write_timeout",
            f"Clients that do not read their answers are disconnected, such as {self.peer}.",
        )
        logger.debug(
            "Connection of %s is closed: it took no bytes of an answer for %g s, or less than %d "
            "per second.",
            self.peer,
            limits.write_timeout,
            limits.write_rate,
        )
        self.transport.abort()

    # -- answers -----------------------------------------------------------------------------------

    def write(
        self,
        answer: HttpResponse | Prediction,
        request_id: str,
        *,
        keep_alive: bool,
        with_body: bool = True,
    ) -> None:
        """Write an answer, not a stream; without its body for a HEAD request."""
        transport = self.transport
        if transport.is_closing():  # uvloop refuses to write
            return
        status, body = answer.status, answer.body
        framing = "" if status == 204 else f"content-length: {len(body)}\r\n"
        common = self._common_headers
        head = response_head(answer, request_id, common, framing, keep_alive=keep_alive)
        if not body or not with_body or status in STATUSES_WITHOUT_BODY:
            transport.write(head)  # a client would read a body as the next answer
        elif len(body) <= _MAX_JOINED_BYTES:
            transport.write(head + body)
        else:
            self._writing = len(body)
            self._write_large(head, body)
            if not transport.get_write_buffer_size():
                self._writing = 0

    def _write_large(self, head: bytes, body: Buffer) -> None:
        transport = self.transport
        if transport.get_extra_info("sslcontext") is None:
            transport.writelines([head, body])
        else:
            # With TLS, uvloop buffers a large piece in its inner transport, which has no limit, and
            # never calls pause_writing.
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
        """Write an answer, wait until the client has read most of it, and close its stream.

        Without ``chunked``, a stream ends with the connection.

        Returns:
            Whether the connection stays open.
        """
        if answer.stream is None:
            self.write(answer, request_id, keep_alive=keep_alive, with_body=with_body)
            self.memory.end()  # what the client has not read is counted apart
            await self._writable.wait()  # a client that does not read gets no further answer
            return keep_alive
        stream, transport = answer.stream, self.transport
        has_body = answer.status not in STATUSES_WITHOUT_BODY
        framing = "transfer-encoding: chunked\r\n" if chunked and has_body else ""
        has_body, keep_alive = has_body and with_body, keep_alive and chunked
        common = self._common_headers
        self._answer_stream = stream
        stream.on_behind = partial(self._break_off, "the client is too slow")
        try:
            if not transport.is_closing():
                head = response_head(answer, request_id, common, framing, keep_alive=keep_alive)
                transport.write(head)
            return await self._write_pieces(stream, has_body, chunked) and keep_alive
        except StreamBroken as error:
            # Without the last chunk, so that the client can see that the answer is incomplete.
            self._break_off(str(error))
            return False
        finally:
            self._answer_stream = None
            self._writing = 0
            stream.close()

    async def _write_pieces(self, stream: Stream, has_body: bool, chunked: bool) -> bool:
        """Write the body of a stream; return whether the connection was open until its end."""
        transport = self.transport
        async for piece in stream.pieces():
            if transport.is_closing():  # uvloop refuses to write
                return False
            if piece and has_body:
                chunk = (b"%x\r\n" % len(piece), piece, b"\r\n") if chunked else (piece,)
                self._writing = len(piece)
                transport.writelines(chunk)
                await self._writable.wait()
        if chunked and has_body and not transport.is_closing():
            transport.write(b"0\r\n\r\n")
        return True

    def _break_off(self, reason: str) -> None:
        if not self.transport.is_closing():
            logger.warning("An answer was broken off: %s", reason)
            self.transport.abort()


def enable_keepalive(transport: asyncio.BaseTransport) -> None:
    """Let the system detect clients that are gone without closing the connection."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def peer_name(transport: asyncio.BaseTransport) -> str:
    """Return ``host:port`` of the client, or its process and user behind a unix socket."""
    name: Any = transport.get_extra_info("peername")
    if isinstance(name, tuple):
        return f"{_without_mapping(name[0])}:{name[1]}"
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return ""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return f"unix:pid={pid},uid={uid}"


def _peer_host(transport: asyncio.BaseTransport) -> str:
    name: Any = transport.get_extra_info("peername")
    return _without_mapping(name[0]) if isinstance(name, tuple) else ""


def _without_mapping(host: str) -> str:
    """Return an address of IP; a client of version 4 at a listener of both has one of version 6."""
    return host.removeprefix("::ffff:") if "." in host else host
