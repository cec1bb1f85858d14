"""The protocol of a connection: answers plain requests itself, and leaves all others to aiohttp.

For a model that answers at once, most of the cost of a prediction is that of a web framework: a
task, a request object, a response, several turns of the event loop. So a plain request
(`requests.plain_request`) is parsed by httptools, submitted with its last byte, and answered as
soon as the worker's reply arrives.

The first other request hands the connection over to aiohttp for good, with all bytes of that
request. Deadlines of heads, limits and the answer to what is not HTTP are the same for both.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import httptools

from marserve.backend.protocol import Buffer, Prediction
from marserve.frontend.batching.jobs import Answer, Stream
from marserve.frontend.errors import BadRequest, NoWorker, ServeError, unexpected
from marserve.frontend.http.client import ClientConnection, enable_keepalive, peer_name
from marserve.frontend.http.heads import Heads
from marserve.frontend.http.large_bodies import LargeBody
from marserve.frontend.http.limits import Connections
from marserve.frontend.http.odd_heads import (
    END,
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    described,
    repaired,
)
from marserve.frontend.http.request_bodies import CONTINUE, late_body
from marserve.frontend.http.requests import (
    LARGE_BYTES,
    IncomingRequest,
    PlainRequest,
    plain_request,
    split_path,
)
from marserve.frontend.http.responses import (
    HttpResponse,
    check_prediction,
    error_response,
    prediction_response,
)
from marserve.frontend.http.router import Router, Submit, refusal
from marserve.frontend.security.usage import UNCOUNTED_BYTES
from marserve.frontend.serving.predict_request import Ticket
from marserve.frontend.serving.request_ids import new_request_id

logger = logging.getLogger(__name__)

#: Statuses behind which the connection is closed: the body came too slowly, or is too long.
CLOSING = frozenset({408, 413})
#: The time for which a client whose request was answered early may continue to send.
LINGERING_SECONDS = 2.0
#: Seconds that a connection may be idle after its first request.
IDLE_SECONDS = 3630.0  # longer than reverse proxies, so that they close the connection first
#: The key of the connection in the extra information of the transport that aiohttp gets.
CONNECTION_INFO = "marserve_connection"
# A small request that takes longer to arrive is left to aiohttp, with the deadlines of heads and
# bodies.
_COLLECTING_SECONDS = 1.0
# A longer head may have a line that aiohttp refuses.
_MAX_HEAD_BYTES = MAX_LINE_BYTES
# Bytes that may arrive before the last request is answered; then reading pauses.
_MAX_WAITING_BYTES = 1 << 16
# Of a large body that is left to aiohttp.
_PART_BYTES = 1 << 20


class Connection(ClientConnection):
    """The connection of one client, with its requests.

    ``make_aiohttp_protocol`` makes the protocol that reads the requests that are not plain.
    """

    # Class attributes as in the base class: few connections set them.
    _has_fast_path = True
    #: aiohttp's protocol, once the connection is handed over.
    _aiohttp: asyncio.Protocol | None = None
    _answered = 0
    _is_handling = False

    def __init__(
        self,
        connections: Connections,
        router: Router,
        make_aiohttp_protocol: Callable[[], asyncio.Protocol],
        *,
        fast_path: bool,
    ) -> None:
        super().__init__(connections, router.common_headers)
        self._router = router
        self._make_aiohttp_protocol = make_aiohttp_protocol
        if not fast_path:
            self._has_fast_path = False
        self.heads = Heads()
        self._head_since: float | None = None  # since when a head with a deadline is due
        self._head_timer: asyncio.TimerHandle | None = None
        self._incoming = IncomingRequest()
        #: None before the connection is made and once it is aiohttp's.
        self._parser: httptools.HttpRequestParser | None = None
        #: What has arrived of a request; or, while `_is_blocked`, what has arrived after it.
        self._pieces: list[bytes] = []
        self._piece_bytes = 0
        #: Whether a request is not answered, or its answer not read, so that the next one waits.
        self._is_blocked = False
        #: The current request; the function that submits it, until that is called; then its ticket.
        self._request: PlainRequest | None = None
        self._submit: Submit | None = None
        self._ticket: Ticket | None = None
        self._streaming: asyncio.Task[None] | None = None
        #: Until a small request must have arrived, or more of a large body.
        self._collecting_timer: asyncio.TimerHandle | None = None
        self._large: LargeBody | None = None  # the body of the current request, while it arrives
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    # -- what the event loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit a client, unless that happened before the TLS handshake, and begin to read."""
        sock = transport.get_extra_info("socket")
        if not self.is_open and not self.admit(transport, sock):
            self.write(error_response(NoWorker("Too many connections.")), "", keep_alive=False)
            self.close()
            return
        self.transport = cast("asyncio.Transport", transport)
        self.peer = peer_name(transport)
        enable_keepalive(transport)
        self._expect_head()
        if self._has_fast_path:
            self._parser = httptools.HttpRequestParser(self._incoming)
        else:
            self._hand_over(())

    def data_received(self, data: bytes) -> None:
        """Read bytes of a request, or keep them until the last request is answered."""
        if self.transport.is_closing():  # TLS still reads for a while
            return
        try:
            if self._parser is None:
                self._pass_on(data)
                return
            self._pieces.append(data)
            self._piece_bytes += len(data)
            if not self._is_blocked:
                self._read(self._parser, data)
                return
            self._expect_head()
            if self._piece_bytes > _MAX_WAITING_BYTES:
                self.pause_reading()
        except Exception as error:  # noqa: BLE001 - the last resort; it is logged
            self.fail(error)

    def eof_received(self) -> bool | None:
        """The client sends no more; the loop then closes the connection, answered or not."""
        return None if self._aiohttp is None else self._aiohttp.eof_received()

    def resume_writing(self) -> None:
        """Write again, and read what the client has sent meanwhile."""
        super().resume_writing()
        self._read_on()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the client's request, and return what the connection uses."""
        self._parser = None
        self.heads.forget()
        self._release_all()
        for timer in (self._head_timer, self._collecting_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._drop_large()
        self._request = self._submit = None
        aiohttp, self._aiohttp = self._aiohttp, None
        if aiohttp is not None:
            aiohttp.connection_lost(cast("Exception | None", exc))
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
        if self._streaming is not None:
            self._streaming.cancel()

    # -- state -------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a request has arrived that is not answered yet."""
        return self._request is not None or self._is_handling or self.heads.count > self._answered

    def end(self) -> None:
        """Close the connection, at once or when the current request is answered."""
        if not self.is_busy:
            self.close()

    # -- deadlines of heads ------------------------------------------------------------------------

    def _expect_head(self) -> None:
        if self._head_since is None:
            self._head_since = self._loop.time()
        if self._head_timer is None:
            self._check_head()

    def _check_head(self) -> None:
        """Close the connection if the head is late; the answer to the last request goes first."""
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

    # -- requests that aiohttp reads ---------------------------------------------------------------

    def _hand_over(self, pieces: Iterable[bytes]) -> None:
        """Leave the connection to aiohttp for good, with the bytes that are not used yet.

        aiohttp's answer to garbage depends on the pieces in which they arrived.
        """
        self.heads.start()
        self._aiohttp = self._make_aiohttp_protocol()
        self._aiohttp.connection_made(cast("asyncio.Transport", _AiohttpTransport(self)))
        for piece in pieces:
            self._pass_on(piece)

    def _pass_on(self, data: bytes) -> None:
        if self._aiohttp is None:  # the connection is closed
            return
        heads = self.heads
        begins, index = heads.is_between, heads.count
        is_busy = index > self._answered
        heads.feed(data)
        if heads.is_in_head or not heads.is_readable:
            self._expect_head()
        elif heads.count:
            self._head_since = None
        if begins or heads.held:
            data = self._with_whole_head(heads.held + data, index, is_busy=is_busy)
        if data:
            self._aiohttp.data_received(data)

    def _with_whole_head(self, data: bytes, index: int, *, is_busy: bool) -> bytes:
        """Return bytes that begin with a request when its head is whole; until then nothing.

        What aiohttp refuses in the head is repaired (`odd_heads`). A request that follows others
        which are not answered is left as it is: where it begins is then known less certainly.
        """
        heads = self.heads
        begin = len(data) - len(data.lstrip(b"\r\n")) if data[:1] in b"\r\n" else 0
        end = data.find(END, begin)
        if end < 0:
            is_short = (
                len(data) <= MAX_HEAD_BYTES and len(data) - data.rfind(b"\n") < MAX_LINE_BYTES
            )
            if is_short and heads.is_readable:
                heads.held = data
                return b""
            end = len(data)
        heads.held = b""
        head = heads.last = data[begin : min(end + len(END), begin + MAX_HEAD_BYTES)]
        heads.last_index = index
        if is_busy or not head.endswith(END):
            return data
        better = repaired(head, self._is_probe)
        return data if better is head else better + data[end + len(END) :]

    def _is_probe(self, method: str, target: str) -> bool:
        path = split_path(target)
        return self._router.is_probe(
            PlainRequest(method, target, {}, {}, 0, path, "", 0.0, self, False)
        )

    def begin_request(self) -> None:
        """Note that a request which aiohttp has read is being answered."""
        self._is_handling = True

    def end_request(self) -> None:
        """Note that its answer is written."""
        self.memory.end()
        self._is_handling = self.has_continued = False
        self._answered += 1
        if not self.heads.is_readable:
            self._head_since = self._loop.time()

    def refuse_unreadable(self, reason: str = "") -> None:
        """Answer a request that aiohttp could not parse, and close the connection."""
        if not self.transport.is_closing():
            head = self.heads.last if self.heads.last_index == self._answered else b""
            method, target, found = described(head, self.heads.error)
            reason = f": {reason or found}" if reason or found else ""
            self._refuse_unread(BadRequest(f"Invalid HTTP message{reason}."), method, target)

    def _refuse_unread(self, error: ServeError, method: str = "", target: str = "") -> None:
        answer = error_response(error)
        # Where they are unknown, method and path are those of TorchServe's access log.
        self._router.access_log.add(
            self.peer, method or "GET", target or "/bad-request", answer.status, 0.0
        )
        has_body = method != "HEAD"
        self.write(answer, new_request_id(), keep_alive=False, with_body=has_body)
        if self._aiohttp is None:
            self._linger()
        else:  # which closes it, too
            self.close()

    def fail(self, error: Exception) -> None:
        """Answer a request after an unexpected exception, and close the connection."""
        logger.error("Cannot answer %s", self.peer, exc_info=error)
        if self._large is not None:
            self._stop_large()
        if self._is_handling:  # aiohttp's request may have a part of its answer
            self.transport.abort()
        elif not self.transport.is_closing():
            self._refuse_unread(unexpected(error))

    # -- plain requests ----------------------------------------------------------------------------

    def _read(self, parser: httptools.HttpRequestParser, data: bytes) -> None:
        """Read bytes of a request; submit it when it is complete, or leave it to aiohttp."""
        incoming = self._incoming
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.leave_to_aiohttp()
            return
        head_bytes = self._piece_bytes - incoming.body_bytes
        # Several requests at once are aiohttp's, which answers them in their order.
        if incoming.has_more or head_bytes > _MAX_HEAD_BYTES:
            self.leave_to_aiohttp()
            return
        if self._submit is None and incoming.has_head:
            request = self._request = plain_request(self, parser, incoming)
            self._submit = None if request is None else self._router.accept(request)
            if request is None or self._submit is None:
                self.leave_to_aiohttp()
                return
        request, submit = self._request, self._submit
        if request is None or submit is None:
            self._wait_for_more()
        elif incoming.is_complete:
            self._start(request, submit, incoming.take_body())
        elif request.length > LARGE_BYTES:
            self._begin_large(request, head_bytes)
        else:
            self._wait_for_more()

    def _wait_for_more(self) -> None:
        if self._submit is None:
            self._expect_head()
        else:
            self._head_since = None
            count = self._piece_bytes - self.memory.bytes
            if not self.memory.may_hold(count):
                self.leave_to_aiohttp()  # it refuses the request, and reads on for a while
                return
            self.memory.hold(count)
        if self._collecting_timer is None:
            self._collecting_timer = self._loop.call_later(
                _COLLECTING_SECONDS, self.leave_to_aiohttp
            )

    def _begin_large(self, request: PlainRequest, head_bytes: int) -> None:
        """Receive the rest of a large body in place; of the request, the pieces have arrived."""
        arrived = b"".join(self._pieces)
        large = LargeBody(self, request.length, memoryview(arrived)[head_bytes:])
        if not large.begin():
            self.leave_to_aiohttp()
            return
        self._pieces, self._piece_bytes = [arrived[:head_bytes]], head_bytes
        self._incoming.reset()
        self._parser = httptools.HttpRequestParser(self._incoming)  # the old one expects a body
        if request.waits_for_continue:
            self.transport.write(CONTINUE)
            self.has_continued = True
        self._large = large
        self._head_since = None
        self.transport.set_protocol(large)
        if self._collecting_timer is not None:
            self._collecting_timer.cancel()
        self._check_large()

    def _check_large(self) -> None:
        """Refuse the request if its body is late."""
        if self._large is None or self._request is None:
            return
        left = self._large.seconds_left()
        if left > 0:
            self._collecting_timer = self._loop.call_later(left, self._check_large)
            return
        request = self._request
        self._stop_large()
        answer = refusal(request, request.refuse, late_body())
        self._router.log(request, answer)
        self.write(answer, request.id, keep_alive=False)
        self._linger()

    def _linger(self) -> None:
        """Close the connection in some seconds, and until then drop what the client sends.

        If bytes arrive at a closed connection it is reset, and the client may lose the answer.
        """
        self._parser = self._request = self._submit = None
        self._pieces.clear()
        self.memory.end()
        self._collecting_timer = self._loop.call_later(LINGERING_SECONDS, self.close)

    def _stop_large(self) -> None:
        self._drop_large()
        self.transport.set_protocol(self)

    def _drop_large(self) -> None:
        if self._large is not None:
            self._large.take()
            self._large = None

    def end_large(self, body: Buffer) -> None:
        """Submit the request: its large body is complete."""
        self._stop_large()
        self.has_continued = False
        self._piece_bytes += len(body)
        assert self._request is not None
        assert self._submit is not None
        self._start(self._request, self._submit, body)

    def leave_to_aiohttp(self) -> None:
        """Hand the connection over, with all bytes of the last request."""
        try:
            if self._large is not None:
                arrived = self._large.take()
                parts = range(0, len(arrived), _PART_BYTES)
                self._pieces += [bytes(arrived[at : at + _PART_BYTES]) for at in parts]
                self._stop_large()
            for timer in (self._collecting_timer, self._idle_timer):
                if timer is not None:
                    timer.cancel()
            self._parser = self._request = self._submit = None
            self._incoming.reset()  # the pieces have the body, too
            self.memory.end()
            pieces, self._pieces = self._pieces, []
            self._hand_over(pieces)
        except Exception as error:  # noqa: BLE001 - out of memory; it is logged
            self.fail(error)

    def _read_on(self) -> None:
        """Read what arrived after a request, if that is answered and the client reads answers."""
        parser = self._parser
        if parser is None or not self._is_blocked or self.is_busy:
            return
        if not self._writable.is_set() or self.transport.is_closing():
            return
        self._is_blocked = False
        if self._pieces:
            try:
                self.resume_reading()
                self._read(parser, b"".join(self._pieces))
            except Exception as error:  # noqa: BLE001 - the last resort; it is logged
                self.fail(error)

    def _start(self, request: PlainRequest, submit: Submit, body: Buffer) -> None:
        self._head_since = self._submit = None
        if self._collecting_timer is not None:
            self._collecting_timer.cancel()
            self._collecting_timer = None
        self._pieces.clear()
        size, self._piece_bytes = self._piece_bytes, 0
        self._is_blocked = True
        try:
            if size > self._usage.uncounted_bytes:
                self.memory.hold(size - self.memory.bytes)
            self._ticket = submit(body, self._on_answer)
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
                if len(outcome.body) > UNCOUNTED_BYTES:
                    self.memory.hold_answer(len(outcome.body))
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
        self._router.log(request, answer)
        keep_alive = answer.status not in CLOSING and not self._connections.is_stopping
        self.write(answer, request.id, keep_alive=keep_alive)
        self._finish(keep_alive=keep_alive)

    def _refuse(self, request: PlainRequest, error: ServeError) -> None:
        self._answer(request, refusal(request, request.refuse, error))

    async def _stream(self, request: PlainRequest, stream: Stream) -> None:
        try:
            answer = prediction_response(stream)
            self._router.log(request, answer)
            self._finish(keep_alive=await self.send(answer, request.id, keep_alive=True))
        except ServeError as error:
            self._refuse(request, error)
        except Exception:  # the last resort
            logger.exception("Cannot answer %s %s", request.method, request.target)
            self.transport.abort()

    def _finish(self, *, keep_alive: bool) -> None:
        """Continue with the next request when an answer is written, or close the connection."""
        self._idle_since = time.monotonic()
        self._request = self._streaming = None
        if self.memory.bytes:
            self.memory.end()
        if not keep_alive or self._connections.is_stopping:
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
        left = self._idle_since + IDLE_SECONDS - time.monotonic()
        if left > 0 or self.is_busy:
            after = left if left > 0 else IDLE_SECONDS
            self._idle_timer = self._loop.call_later(after, self._check_idle)
        else:
            self.close()


class _AiohttpTransport:
    """The transport that aiohttp gets: the client's, with the connection's own methods.

    The handler of `HttpServer` writes its answers to the client's transport itself. So
    aiohttp writes only its page about a request that it could not parse; our error replaces it.
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
