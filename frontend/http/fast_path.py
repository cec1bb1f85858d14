"""The fast path: plain predictions are answered between two calls of the event loop.

For a model that answers at once, most of what a prediction costs is what a web framework does
around it: a task, a request object, a response, several turns of the loop. A plain request needs
none of it: it is read by httptools, submitted in the turn of the loop in which its last byte came,
and answered in the turn in which the worker's reply does.

What is plain stands in one place, `_plain_request`, beside what a route makes of it
(`Route.accept`). At the first request that is anything else the connection is handed over to
aiohttp, for good, with all bytes of that request: so aiohttp, and the rules behind it, have the
word about everything that is special, broken or hostile. An `HttpServer` with `Connection` in the
place of `FastConnection` is a server without this file.
"""

import asyncio
import logging
import time
from typing import Final

import httptools

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Answer as ModelAnswer
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.errors import ServeError
from marserve.frontend.http.connections import IDLE_SECONDS, Connection
from marserve.frontend.http.http_server import HttpServer
from marserve.frontend.http.request_ids import new_request_id
from marserve.frontend.http.responses import (
    HttpResponse,
    check_prediction,
    prediction_response,
    write_response,
)
from marserve.frontend.http.router import PlainRequest, Submit, split_path
from marserve.frontend.models.predict_request import Ticket

logger = logging.getLogger(__name__)

# A request that has not come by then is for aiohttp, and the deadlines of heads and bodies.
_COLLECTING_SECONDS = 1.0
# aiohttp refuses longer lines and more of them.
_MAX_HEAD_BYTES = 8190
_MAX_HEADERS = 100
# Bytes behind a request under way, before we stop reading.
_MAX_WAITING_BYTES = 1 << 16
_METHODS: Final = (b"POST", b"PUT")
# They ask for something else than an answer.
_SPECIAL_HEADERS: Final = frozenset(("expect", "te", "trailer", "transfer-encoding", "upgrade"))


class FastConnection(Connection):
    """A connection whose requests are answered here while they are plain.

    Args:
        server: Whose client that is.
    """

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._router = server.router
        self._incoming = _Incoming()
        #: None before the first byte can come, and when the connection is aiohttp's.
        self._parser: httptools.HttpRequestParser | None = None
        #: What has come of a request; or, while `_is_blocked`, what waits behind it.
        self._pieces: list[bytes] = []
        self._piece_bytes = 0
        self._is_blocked = False
        #: A request whose head is plain; what submits it, until it is submitted; how to cancel it.
        self._request: PlainRequest | None = None
        self._submit: Submit | None = None
        self._ticket: Ticket | None = None
        self._streaming: asyncio.Task[None] | None = None
        self._collecting_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    # -- what the event loop calls -----------------------------------------------------------------

    def begin(self) -> None:
        """Read requests until one is not plain."""
        self._parser = httptools.HttpRequestParser(self._incoming)

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        if self._parser is None:
            super().data_received(data)
            return
        if self.transport.is_closing():  # TLS goes on reading for a while
            return
        self._pieces.append(data)
        self._piece_bytes += len(data)
        if not self._is_blocked:
            self._read(self._parser, data)
            return
        self.expect_head()
        if self._piece_bytes > _MAX_WAITING_BYTES:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """The client has caught up; what it sent meanwhile is read."""
        super().resume_writing()
        self._read_on()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has left, or we have hung up: nobody waits for an answer."""
        self._parser = None
        super().connection_lost(exc)
        for timer in (self._collecting_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
        if self._streaming is not None:
            self._streaming.cancel()

    @property
    def is_busy(self) -> bool:
        """Whether a request has come that is not answered yet."""
        return self._request is not None or super().is_busy

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, parser: httptools.HttpRequestParser, data: bytes) -> None:
        """Read what has come of a request; submit it when it is whole, unless it is not plain."""
        incoming = self._incoming
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._leave_to_aiohttp()
            return
        head_bytes = self._piece_bytes - incoming.body_bytes
        # Several requests at once, to be answered in order, are aiohttp's business.
        if incoming.has_more or head_bytes > _MAX_HEAD_BYTES:
            self._leave_to_aiohttp()
            return
        if self._submit is None and incoming.has_head:
            request = self._request = _plain_request(parser, incoming)
            self._submit = None if request is None else self._router.accept(request)
            if self._submit is None:
                self._leave_to_aiohttp()
                return
        if incoming.is_whole and self._submit is not None and self._request is not None:
            self._start(self._request, self._submit)
        else:
            self._wait()

    def _wait(self) -> None:
        """Wait for more of a request, but not for long."""
        if self._submit is None:
            self.expect_head()
        else:
            self._head_since = None
        if self._collecting_timer is None:
            self._collecting_timer = self._loop.call_later(
                _COLLECTING_SECONDS, self._leave_to_aiohttp
            )

    def _leave_to_aiohttp(self) -> None:
        """Hand the connection over, with all there is of the request that has come last."""
        for timer in (self._collecting_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._parser = self._request = self._submit = None
        pieces, self._pieces = self._pieces, []
        self.hand_over(pieces)

    def _read_on(self) -> None:
        """Read what has come behind a request that is answered, if the client reads its answers."""
        parser = self._parser
        if parser is None or not self._is_blocked or self._is_writing_paused or self.is_busy:
            return
        if self.transport.is_closing():
            return
        self._is_blocked = False
        if self._pieces:
            self.transport.resume_reading()
            self._read(parser, b"".join(self._pieces))

    # -- answering ---------------------------------------------------------------------------------

    def _start(self, request: PlainRequest, submit: Submit) -> None:
        """Submit a request that has come whole."""
        self._head_since = self._submit = None
        if self._collecting_timer is not None:
            self._collecting_timer.cancel()
            self._collecting_timer = None
        self._pieces.clear()
        self._piece_bytes = 0
        self._is_blocked = True
        try:
            self._ticket = submit(self._incoming.take_body(), self._on_answer)
        except ServeError as error:
            self._refuse(request, error)
        except Exception:  # the last resort
            logger.exception("Cannot answer %s %s", request.method, request.target)
            self._refuse(request, ServeError("Internal server error."))

    def _on_answer(self, outcome: ModelAnswer) -> None:
        """Write the answer. Whatever goes wrong here must not reach its batch-mates."""
        self._ticket = None
        request = self._request
        assert request is not None
        try:
            if isinstance(outcome, Prediction):
                check_prediction(outcome)
                self._answer(request, outcome)
            elif isinstance(outcome, Stream):
                self._streaming = self._loop.create_task(self._stream(request, outcome))
                # By itself too: a task that is cancelled before it begins closes nothing.
                self._streaming.add_done_callback(lambda _: outcome.close())
            else:
                self._refuse(request, outcome)
        except ServeError as error:
            self._refuse(request, error)
        except Exception:  # the last resort
            logger.exception("Cannot answer %s %s", request.method, request.target)
            self.transport.abort()

    def _answer(self, request: PlainRequest, answer: HttpResponse | Prediction) -> None:
        self._log(request, answer.status)
        keep_alive = answer.status < 400
        common = self._router.common_headers
        write_response(self.transport, answer, request.id, common, keep_alive=keep_alive)
        self._finish(keep_alive=keep_alive)

    def _refuse(self, request: PlainRequest, error: ServeError) -> None:
        self._answer(request, request.refuse(error))

    async def _stream(self, request: PlainRequest, stream: Stream) -> None:
        try:
            answer = prediction_response(stream)
            self._log(request, answer.status)
            self._finish(keep_alive=await self.send(answer, request.id, keep_alive=True))
        except ServeError as error:
            self._refuse(request, error)
        except Exception:  # the last resort
            logger.exception("Cannot answer %s %s", request.method, request.target)
            self.transport.abort()

    def _log(self, request: PlainRequest, status: int) -> None:
        self._idle_since = now = time.monotonic()
        seconds = now - request.arrived
        self._router.access_log.add(self.peer, request.method, request.target, status, seconds)

    def _finish(self, *, keep_alive: bool) -> None:
        """Go on when an answer is written: with the next request, or not at all."""
        self._request = self._streaming = None
        if not keep_alive or self._server.is_stopping:
            self.transport.close()
            return
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(IDLE_SECONDS, self._check_idle)
        if self._pieces or self._is_writing_paused:
            # Not from here: a batch may be half answered.
            self._loop.call_soon(self._read_on)
        else:
            self._is_blocked = False

    def _check_idle(self) -> None:
        """Hang up if the connection is not used any more."""
        left = self._idle_since + IDLE_SECONDS - time.monotonic()
        if left > 0 or self.is_busy:
            after = left if left > 0 else IDLE_SECONDS
            self._idle_timer = self._loop.call_later(after, self._check_idle)
        else:
            self.transport.close()


class _Incoming:
    """What httptools tells of the request that comes.

    Attributes:
        target: As the client wrote it.
        headers: As the client wrote them.
        body_bytes: How much of the body has come.
        has_head: Whether all of the head has come.
        is_whole: Whether all of the request has come.
        has_more: Whether another request has begun behind it.
    """

    def __init__(self) -> None:
        self._has_begun = self.has_more = False
        self._reset()

    def _reset(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body_bytes = 0
        self._body: list[bytes] = []
        self.has_head = self.is_whole = False

    def take_body(self) -> bytes:
        """The body of a request that is whole; from now on the next request comes."""
        body = self._body
        self._has_begun = False
        self._reset()
        return body[0] if len(body) == 1 else b"".join(body)

    def on_message_begin(self) -> None:
        """Called by the parser, as all that follow."""
        self.has_more = self._has_begun
        self._has_begun = True

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self.body_bytes += len(body)

    def on_message_complete(self) -> None:
        self.is_whole = True


def _plain_request(parser: httptools.HttpRequestParser, incoming: _Incoming) -> PlainRequest | None:
    """The request whose head has come; None where aiohttp is to say what becomes of it.

    Plain is a POST or PUT of HTTP/1.1 to a path, with a length, that keeps the connection, has no
    header twice, none that says something special, a host, and nothing but ASCII in its head.
    """
    method, headers = parser.get_method(), incoming.headers
    if method not in _METHODS or parser.get_http_version() != "1.1" or len(headers) > _MAX_HEADERS:
        return None
    raw_headers: dict[str, str] = {}
    by_name: dict[str, str] = {}
    try:
        target = incoming.target.decode("ascii")
        for name, value in headers:
            if value.endswith((b" ", b"\t")):  # aiohttp has more than one opinion about it
                return None
            key, text = name.decode("ascii"), value.decode("ascii")
            raw_headers[key] = by_name[key.lower()] = text
    except UnicodeDecodeError:
        return None
    length = by_name.get("content-length", "")
    if (
        not target.startswith("/")
        or not length.isdecimal()
        or len(by_name) != len(headers)
        or not _SPECIAL_HEADERS.isdisjoint(by_name)
        or "host" not in by_name
        or by_name.get("connection", "keep-alive").lower() != "keep-alive"
    ):
        return None
    return PlainRequest(
        method.decode(),
        target,
        by_name,
        raw_headers,
        int(length),
        split_path(target),
        new_request_id(),
        time.monotonic(),
    )
