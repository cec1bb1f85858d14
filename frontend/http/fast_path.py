"""The fast path: answers plain predictions without aiohttp.

For a model that answers at once, most of the cost of a prediction is that of a web framework: a
task, a request object, a response, several turns of the event loop. A plain request is parsed by
httptools, submitted with its last byte, and answered as soon as the worker's reply has come.

`_plain_request` decides which requests are plain, and `Route.accept` which of them a route takes.
At the first other request the connection is handed over to aiohttp for good, with all bytes of that
request. `HttpServer` with `Connection` for `FastConnection` is a server without this file.
"""

import asyncio
import logging
import time
from typing import Final

import httptools

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Answer, Stream
from marserve.frontend.errors import ServeError, unexpected
from marserve.frontend.http.connections import IDLE_SECONDS, Connection
from marserve.frontend.http.http_server import HttpServer
from marserve.frontend.http.responses import HttpResponse, check_prediction, prediction_response
from marserve.frontend.http.router import PlainRequest, Submit, split_path
from marserve.frontend.serving.predict_request import Ticket
from marserve.frontend.serving.request_ids import new_request_id

logger = logging.getLogger(__name__)

# A request that takes longer to come is left to aiohttp, with the deadlines of heads and bodies.
_COLLECTING_SECONDS = 1.0
# aiohttp refuses longer lines and more of them.
_MAX_HEAD_BYTES = 8190
_MAX_HEADERS = 100
# Bytes that may come before the last request is answered; then we stop reading.
_MAX_WAITING_BYTES = 1 << 16
_METHODS: Final = (b"POST", b"PUT")
# They ask for something beside an answer.
_SPECIAL_HEADERS: Final = frozenset(("expect", "te", "trailer", "transfer-encoding", "upgrade"))


class FastConnection(Connection):
    """A connection whose requests are answered here while they are plain."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self._incoming = _Incoming()
        #: None before the connection is made, and once it is aiohttp's.
        self._parser: httptools.HttpRequestParser | None = None
        #: What has come of a request; or, while `_is_blocked`, what has come after it.
        self._pieces: list[bytes] = []
        self._piece_bytes = 0
        #: Whether a request is not answered, or its answer not read, so that no other is begun.
        self._is_blocked = False
        #: A request whose head is plain; what submits it, until it is submitted; then its ticket.
        self._request: PlainRequest | None = None
        self._submit: Submit | None = None
        self._ticket: Ticket | None = None
        self._streaming: asyncio.Task[None] | None = None
        self._collecting_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    # -- what the event loop calls -----------------------------------------------------------------

    def begin(self) -> None:
        """Begin to read requests, until one is not plain."""
        self._parser = httptools.HttpRequestParser(self._incoming)

    def data_received(self, data: bytes) -> None:
        """Read bytes of a request, or keep them until the last request is answered."""
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
            self.pause_reading()

    def resume_writing(self) -> None:
        """The client has caught up: read what it has sent meanwhile."""
        super().resume_writing()
        self._read_on()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has left, or we have hung up: cancel its request."""
        self._parser = None
        super().connection_lost(exc)
        self._cancel_timers()
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
        """Read bytes of a request; submit it when it is complete, or leave it to aiohttp."""
        incoming = self._incoming
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._leave_to_aiohttp()
            return
        head_bytes = self._piece_bytes - incoming.body_bytes
        # Several requests at once are aiohttp's, which answers them in their order.
        if incoming.has_more or head_bytes > _MAX_HEAD_BYTES:
            self._leave_to_aiohttp()
            return
        if self._submit is None and incoming.has_head:
            request = self._request = _plain_request(self, parser, incoming)
            self._submit = None if request is None else self._router.accept(request)
            if self._submit is None:
                self._leave_to_aiohttp()
                return
        if incoming.is_complete and self._submit is not None and self._request is not None:
            self._start(self._request, self._submit)
            return
        if self._submit is None:
            self.expect_head()
        else:
            self._head_since = None
            count = self._piece_bytes - self._held
            if self._usage.limit_of(self.client, count):
                self._leave_to_aiohttp()  # it refuses the request, and reads on for a while
                return
            self.hold(count)
        if self._collecting_timer is None:
            self._collecting_timer = self._loop.call_later(
                _COLLECTING_SECONDS, self._leave_to_aiohttp
            )

    def _leave_to_aiohttp(self) -> None:
        """Hand the connection over, with all bytes of the last request."""
        self._cancel_timers()
        self._parser = self._request = self._submit = None
        self._incoming.reset()  # the pieces have the body, too
        self.release()
        pieces, self._pieces = self._pieces, []
        try:
            self.hand_over(pieces)
        except Exception:  # out of memory; a timer that raises would leave the client waiting
            logger.exception("Cannot answer %s", self.peer)
            self.transport.abort()

    def _cancel_timers(self) -> None:
        for timer in (self._collecting_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()

    def _read_on(self) -> None:
        """Read what has come after a request, if that is answered and the client reads answers."""
        parser = self._parser
        if parser is None or not self._is_blocked or self.is_busy:
            return
        if not self._writable.is_set() or self.transport.is_closing():
            return
        self._is_blocked = False
        if self._pieces:
            self.resume_reading()
            self._read(parser, b"".join(self._pieces))

    # -- answering ---------------------------------------------------------------------------------

    def _start(self, request: PlainRequest, submit: Submit) -> None:
        self._head_since = self._submit = None
        if self._collecting_timer is not None:
            self._collecting_timer.cancel()
            self._collecting_timer = None
        self._pieces.clear()
        size, self._piece_bytes = self._piece_bytes, 0
        self._is_blocked = True
        try:
            if size > self._usage.uncounted_bytes:
                self.hold(size - self._held)
            self._ticket = submit(self._incoming.take_body(), self._on_answer)
        except ServeError as error:
            self._refuse(request, error)
        except Exception as error:  # the last resort
            logger.exception("Cannot answer %s %s", request.method, request.target)
            self._refuse(request, unexpected(error))

    def _on_answer(self, outcome: Answer) -> None:
        """Write the answer. An error here must not reach the other requests of the batch."""
        self._ticket = None
        request = self._request
        assert request is not None
        try:
            if isinstance(outcome, Prediction):
                check_prediction(outcome)
                self._answer(request, outcome)
            elif isinstance(outcome, Stream):
                self._streaming = self._loop.create_task(self._stream(request, outcome))
                # Here too: a task that is cancelled before it begins closes nothing.
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
        self.write(answer, request.id, keep_alive=keep_alive)
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
        """Go on with the next request when an answer is written, or hang up."""
        self._request = self._streaming = None
        if self._held:
            self.release()
        if not keep_alive or self._server.is_stopping:
            self.close()
            return
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(IDLE_SECONDS, self._check_idle)
        if self._pieces or not self._writable.is_set():
            # Later, since the batch of this request may not be answered completely.
            self._loop.call_soon(self._read_on)
        else:
            self._is_blocked = False

    def _check_idle(self) -> None:
        """Hang up if the connection has been idle for too long."""
        left = self._idle_since + IDLE_SECONDS - time.monotonic()
        if left > 0 or self.is_busy:
            after = left if left > 0 else IDLE_SECONDS
            self._idle_timer = self._loop.call_later(after, self._check_idle)
        else:
            self.close()


class _Incoming:
    """Callbacks of httptools: what has come of a request, as the client wrote it."""

    def __init__(self) -> None:
        self.has_more = False  # another request has begun after this one
        self.reset()

    def reset(self) -> None:
        """Forget the request; from now on the next one comes."""
        self._has_begun = False
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body_bytes = 0
        self._body: list[bytes] = []
        self.has_head = self.is_complete = False

    def take_body(self) -> bytes:
        """The body of a complete request, which is forgotten."""
        body = self._body
        self.reset()
        return body[0] if len(body) == 1 else b"".join(body)

    def on_message_begin(self) -> None:
        """A request begins; called by the parser, as all methods that follow."""
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
        self.is_complete = True


def _plain_request(
    connection: Connection, parser: httptools.HttpRequestParser, incoming: _Incoming
) -> PlainRequest | None:
    """The request whose head has come; None if it is not plain.

    Plain is a POST or PUT of HTTP/1.1 to a path, with a length, that keeps the connection, has a
    host, no header twice, none of the special headers, and nothing but ASCII in its head.
    """
    method, headers = parser.get_method(), incoming.headers
    if method not in _METHODS or parser.get_http_version() != "1.1" or len(headers) > _MAX_HEADERS:
        return None
    raw_headers: dict[str, str] = {}
    by_name: dict[str, str] = {}
    try:
        target = incoming.target.decode("ascii")
        for name, value in headers:
            if value.endswith((b" ", b"\t")):  # aiohttp 3.11 keeps the blanks, later ones do not
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
        connection,
    )
