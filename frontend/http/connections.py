"""Connections: which are let in, how long they may keep us waiting, who is at the other end.

Two things wear a server down without a single request: clients that never finish one, and more
clients than there are file descriptors. A head that is begun has a deadline, and so has the first
one of a connection; an idle connection that was used before may stay (aiohttp ends it after an
hour). Where descriptors run short, new connections are refused while there are still some left for
workers, archives and logs; and each listener keeps a few places, so that a flood at one of them
does not lock the operator out of another.
"""

import asyncio
import logging
import resource
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http import RawRequestMessage, StreamWriter
from aiohttp.http_exceptions import HttpProcessingError

from marserve.frontend.errors import BadRequest, NoWorker, ServeError
from marserve.frontend.http.express import Errand, Lane
from marserve.frontend.http.responses import json_text

logger = logging.getLogger(__name__)

_Request = tuple[RawRequestMessage, StreamReader]
#: Given the connection, the head and the body of a request.
BeginExpress = Callable[[Lane, RawRequestMessage, StreamReader], Errand | None]

# How long a client whose request was answered early (413) may go on sending before we hang up.
_LINGERING_SECONDS = 2.0
# Descriptors that connections leave to everything else.
_SPARE_DESCRIPTORS = 64
# So many connections a listener always takes, out of the spare descriptors.
_KEPT_PLACES = 8
_WARNING_SECONDS = 60.0
# Called once per request; by this name in half the time that super() takes to find it.
_receive = web.RequestHandler.data_received
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class ConnectionLimits:
    """What the clients of one listener may hold.

    Attributes:
        head_timeout: Seconds for the head of a request, from the connection's first moment or from
            the head's first byte.
        max_connections: Open at the same time; 0 leaves it to the file descriptors.
    """

    head_timeout: float = 60.0
    max_connections: int = 0


class ConnectionServer(web.Server):
    """Makes a `Connection` of every client that comes.

    Args:
        answer: Answers a request.
        limits: What clients may hold.
        refuse: Answers a peer whose request could not be read.
        express: Begins to answer a request that has just come, if it is plain.
    """

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: ConnectionLimits,
        refuse: Callable[[str, ServeError], web.StreamResponse],
        express: BeginExpress,
    ) -> None:
        super().__init__(
            answer,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,  # TorchServe passed bodies on as they came
            lingering_time=_LINGERING_SECONDS,
        )
        self.limits = limits
        self.refuse = refuse
        self.express = express
        self._warned = -_WARNING_SECONDS

    def __call__(self) -> web.RequestHandler:
        """The protocol of a new connection."""
        return Connection(self, loop=self._loop, **self._kwargs)

    def admits(self, transport: asyncio.BaseTransport) -> bool:
        """Whether there is a place for one more connection."""
        taken = len(self._connections)
        if self.limits.max_connections and taken >= self.limits.max_connections:
            self._warn(f"{taken} are open, as many as max_connections allows")
        elif taken >= _KEPT_PLACES and _is_among_the_last(transport):
            self._warn(f"{taken} are open here, and file descriptors run short (ulimit -n)")
        else:
            return True
        return False

    def _warn(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._warned >= _WARNING_SECONDS:
            self._warned = now
            logger.warning("New connections are refused: %s.", reason)


class Connection(web.RequestHandler):
    """aiohttp's protocol of one connection, with our limits and our error bodies.

    Attributes:
        peer: Who is at the other end, for the access log.
    """

    __slots__ = ("_awaited", "_errand", "_head_timer", "_parked", "peer")

    def __init__(self, server: ConnectionServer, **options: Any) -> None:
        super().__init__(server, **options)
        self.peer = ""
        self._awaited = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._errand: Errand | None = None
        #: What aiohttp's task waits for, while an errand is under way: as long as aiohttp does not
        #: see it, what comes waits in its queue, and answers go out in the order of requests.
        self._parked: asyncio.Future[None] | None = None
        self._parser: Any = _Sorter(self._parser, self.sort)

    @property
    def _server(self) -> ConnectionServer:
        return cast("ConnectionServer", self._manager)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop when a client has come."""
        self.peer = _peer(transport)
        if not self._server.admits(transport):
            _refuse(cast("asyncio.Transport", transport))
            self.close()
            return
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop for every piece that comes."""
        count = self._request_count
        _receive(self, data)
        # No whole head was in it, and nothing but a head can have begun.
        if count == self._request_count != self._awaited and self._expects_head():
            self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by the event loop at the end."""
        self._stop_timer()
        super().connection_lost(exc)
        if self._errand is not None:
            self._errand.abandon()
            self._errand = self._parked = None

    # The express lane.

    def sort(self, requests: Sequence[_Request]) -> Sequence[_Request]:
        """Take out of the requests that have come what goes by the express lane or has to wait.

        Returns:
            Those that go aiohttp's way, now.
        """
        waiter = self._waiter
        # Only if the last answer is on its way, and the client reads it.
        if len(requests) > 1 or waiter is None or waiter.done() or self._paused:
            return requests
        self._parked, self._waiter = waiter, None
        errand = self._server.express(self, *requests[0])
        if errand is None:
            self._waiter, self._parked = waiter, None
            return requests
        self._request_count += 1
        if self._parked is not None:  # else it has ended already
            self._errand = errand
            self._request_in_progress = True
        return ()

    def errand_ended(self, *, keep_alive: bool) -> None:
        """The answer of the express lane is written; see `express.Lane`."""
        waiter = self._waiter = self._parked
        self._errand = self._parked = None
        self._request_in_progress = False
        shutdown = self._handler_waiter
        if shutdown is not None and not shutdown.done():
            shutdown.set_result(None)
        if self._close or self._force_close or not keep_alive:
            self.force_close()
            return
        self._keep_alive()
        if self._messages and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _keep_alive(self) -> None:
        """Let the connection idle from now on, as aiohttp does behind an answer."""
        self._keepalive = True
        self._next_keepalive_close_time = end = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(end, self._process_keepalive)

    def make_request(
        self, message: RawRequestMessage, body: StreamReader, writer: StreamWriter
    ) -> web.BaseRequest:
        """See `express.Lane`."""
        assert self._request_factory is not None
        task = asyncio.current_task()
        assert task is not None
        return self._request_factory(message, body, self, writer, task)

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002 - aiohttp's signature
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's signature
    ) -> web.StreamResponse:
        """Called by aiohttp when a request cannot be parsed, or when we failed badly."""
        error: ServeError = BadRequest("Invalid HTTP message.")
        if not isinstance(exc, HttpProcessingError) and status != 400:
            logger.error("A connection failed with status %d.", status, exc_info=exc)
            error = ServeError("Internal server error.", status=status)
        answer = self._server.refuse(self.peer, error)
        answer.force_close()
        return answer

    def _await_head(self) -> None:
        self._stop_timer()
        self._awaited = self._request_count
        timeout = self._server.limits.head_timeout
        self._head_timer = self._loop.call_later(timeout, self._check_head)

    def _expects_head(self) -> bool:
        """Whether nothing but a head can come, unless all is left to aiohttp's task."""
        if self._errand is not None:
            return not self._messages
        waiter = self._waiter
        return waiter is not None and not waiter.done()

    def _check_head(self) -> None:
        self._head_timer = None
        if self._awaited != self._request_count:
            return
        if self._errand is not None:  # the answer to the last request comes first
            self._await_head()
        else:
            logger.debug("Connection of %s is closed: no request came in time.", self.peer)
            self.force_close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Sorter:
    """Stands between aiohttp's parser and aiohttp, which sees what is left for it only.

    Args:
        parser: aiohttp's.
        sort: Says what is left.
    """

    __slots__ = ("_consumed", "_feed", "_parser", "_sort")

    def __init__(self, parser: Any, sort: Callable[[Sequence[_Request]], Sequence[_Request]]):
        self._parser = parser
        self._feed = parser.feed_data
        # The parser counts what waits for an answer, and stops at some number.
        self._consumed = parser.message_consumed
        self._sort = sort

    def feed_data(self, data: bytes) -> tuple[Sequence[_Request], bool, bytes]:
        """See aiohttp's ``HttpParser.feed_data``."""
        requests, upgraded, tail = self._feed(data)
        if requests:
            requests = self._sort(requests)
            if not requests:  # it was one
                self._consumed()
        return requests, upgraded, tail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def _is_among_the_last(transport: asyncio.BaseTransport) -> bool:
    """Whether a connection has one of the descriptors that are to be spared.

    The system gives out the lowest free number, so the number of a new one tells how many are in
    use, by whatever; nobody has to count.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return False
    number: int = transport.get_extra_info("socket").fileno()
    return number >= soft - min(_SPARE_DESCRIPTORS, soft // 4)


def _refuse(transport: asyncio.Transport) -> None:
    transport.write(_NO_PLACE)
    transport.close()


def _no_place() -> bytes:
    error = NoWorker("Too many connections.")
    document = {"code": error.status, "type": error.wire_type, "message": error.message}
    body = json_text(document).encode()
    lines = (
        f"HTTP/1.1 {error.status} Service Unavailable",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body


_NO_PLACE = _no_place()


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
