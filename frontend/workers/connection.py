"""The frontend's connection to one worker: load, predict, with deadlines.

It is an `asyncio.BufferedProtocol`, not a pair of streams: a reply is decoded in the buffer that
received it, and its callback is called in the same turn of the event loop.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from marserve.backend.framing import Decoder, encode
from marserve.backend.large_messages import widen
from marserve.backend.protocol import (
    Call,
    CallReply,
    CancelCall,
    CancelPredict,
    Compare,
    Compared,
    EndSequence,
    Load,
    Loaded,
    LoadFailure,
    LoadStarted,
    Message,
    NextBatch,
    Piece,
    PiecesRead,
    Predict,
    Profile,
    Profiled,
    ProtocolError,
    Reply,
    SetThreads,
    ThreadsSet,
)
from marserve.frontend.batching.rows import for_each_row
from marserve.frontend.workers.calls import WorkerCalls
from marserve.frontend.workers.failures import (
    ConnectionLost,
    Disconnected,
    Poisoned,
    ResponseTimedOut,
    StartTimedOut,
)

logger = logging.getLogger(__name__)

# Limit of a reply without the bodies: headers, metrics, JSON.
_META_BYTES = 16 * 1024 * 1024
_MAX_FRAME_BYTES = (1 << 32) - 1
_JOINED_BYTES = 64 * 1024
# If a timer is late by more than this, in seconds, the frontend was stopped meanwhile.
_PAUSED_SECONDS = 0.1
# In a window. Shorter answers cause no report.
_REPORTS = 4
#: The number of the `Load` message; batches are numbered from 1.
_LOAD = 0

BatchAnswer = Reply | Piece | NextBatch
OnReply = Callable[[BatchAnswer], None]
_SERIAL = (Reply, Piece)
_OVERLAPPING = (Reply, Piece, NextBatch)
_NOT_LAST = frozenset({Piece, NextBatch, LoadStarted})
_CALLS = frozenset({Call, CancelCall})
#: The answers to messages other than batches.
_ANSWERS: dict[type[Message], tuple[type[Message], ...]] = {
    EndSequence: (Reply,),
    Profile: (Profiled,),
    Compare: (Compared,),
    SetThreads: (ThreadsSet,),
}


class _Exchange(NamedTuple):
    """A message whose answer is due."""

    due: int  # the number of predictions in the answer
    answers: tuple[type[Message], ...]  # those not in `_NOT_LAST` end the exchange
    on_answer: Callable[[Any], None]
    caller: Any  # given to `WorkerCalls` with each call made on behalf of the message


class WorkerConnection(asyncio.BufferedProtocol):
    """The frontend's end of the socket pair to a worker.

    ``max_response_bytes`` limits each prediction; a reply may have as many predictions as the
    largest batch so far had inputs. ``name`` is that of the worker, for the log.

    Attributes:
        lost: Done, with the reason, when the worker cannot answer any more.
        on_lost: Called at that moment.
        overlaps: As in `Loaded`, as are ``ends_sequences``, ``is_cancellable`` and ``is_relay``.
        calls: None for a worker that cannot make calls.
        waits_for_reader: Returns whether a handler may wait until more of its answer is read.
        stream_window: As in `Load`.
    """

    def __init__(self, max_response_bytes: int, name: str = "") -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self.lost: asyncio.Future[ConnectionLost] = self._loop.create_future()
        self.on_lost: Callable[[], object] = lambda: None
        self.overlaps = 0
        self.calls: WorkerCalls | None = None
        self.waits_for_reader: Callable[[], bool] = lambda: False
        self.stream_window = 0
        self._max_call_bytes = 0
        self.ends_sequences = self.is_cancellable = self.is_relay = False
        self._max_response_bytes = max_response_bytes
        self._decoder = Decoder(_META_BYTES)
        self._max_due = 0
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        #: Called when the worker has read what was written.
        self._on_read: list[Callable[[], object]] = []
        #: By number of the message.
        self._exchanges: dict[int, _Exchange] = {}
        #: By number, which is negative: the callbacks of `probe`.
        self._probes: dict[int, Callable[[Reply], object]] = {}
        self._last_probe = 0
        #: The number of messages that were sent after the load, and how many of them failed.
        self._sent = self._failed = 0
        self._timeout: float | None = None
        self._deadline = 0.0
        self._timer_at = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    @classmethod
    async def from_socket(
        cls, sock: socket.socket, *, max_response_bytes: int, name: str = ""
    ) -> "WorkerConnection":
        """Return a connection over the frontend's end of a socket pair."""
        widen(sock)
        loop = asyncio.get_running_loop()
        making = loop.create_task(
            loop.create_connection(lambda: cls(max_response_bytes, name), sock=sock)
        )
        try:
            _, connection = await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait({making})  # a turn or two; the transport must not leak
            if not making.exception():
                making.result()[1].close()
            raise
        return connection

    async def load(
        self, load: Load, timeout: float | None, start_seconds: float
    ) -> Loaded | LoadFailure:
        """Make the worker load its model, and wait for the result.

        Loading must begin within ``start_seconds``, and end ``timeout`` seconds after that.

        Raises:
            StartTimedOut: Loading did not begin in time.
            ConnectionLost: The worker ended, broke the protocol or did not answer in time.
        """
        result: asyncio.Future[Loaded | LoadFailure] = self._loop.create_future()
        has_started = False

        def receive(answer: LoadStarted | Loaded | LoadFailure) -> None:
            nonlocal has_started
            has_started = True
            if isinstance(answer, LoadStarted):
                self._timeout = timeout
                self._expect_reply()
            else:
                result.set_result(answer)

        self._max_call_bytes, self.stream_window = load.max_call_bytes, load.stream_window
        exchange = _Exchange(0, (LoadStarted, Loaded, LoadFailure), receive, None)
        self._send(load, exchange, start_seconds)
        ends: set[asyncio.Future[Any]] = {result, self.lost}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)  # the watchdog's deadline
        if not has_started and isinstance(self.failure, ResponseTimedOut):
            raise StartTimedOut(start_seconds)
        if not result.done():
            raise self.lost.result()
        loaded = result.result()
        if isinstance(loaded, Loaded):
            self.overlaps, self.ends_sequences = loaded.overlaps, loaded.ends_sequences
            self.is_cancellable, self.is_relay = loaded.is_cancellable, loaded.is_relay
        return loaded

    def predict(
        self, batch: Predict, timeout: float | None, on_reply: OnReply, caller: Any = None
    ) -> None:
        """Send one batch, after setting its number.

        The worker counts as hung after ``timeout`` seconds without an answer. ``on_reply`` receives
        the reply, and before it streamed pieces; not after the connection is `lost`.

        Raises:
            ProtocolError: The batch is too large to be sent.
        """
        batch.number = self._sent = self._sent + 1
        answers = _OVERLAPPING if self.overlaps else _SERIAL
        exchange = _Exchange(batch.count, answers, on_reply, caller)
        self._send(batch, exchange, timeout, batch.number)

    def probe(self, request: Predict, on_reply: Callable[[Reply], object]) -> None:
        """Send a request of the server, which does not count for the watchdog and `has_answered`.

        Its number is set. ``on_reply`` is not called after `cancel`, nor when the worker is lost.
        """
        request.number = self._last_probe = self._last_probe - 1
        if not self.lost.done() and self._transport is not None:
            self._probes[request.number] = on_reply
            self._transport.writelines(encode(request))

    def cancel(self, number: int) -> None:
        """Report that no client waits for the batch of this number, if it is not answered yet."""
        is_open = number in self._exchanges or self._probes.pop(number, None) is not None
        if is_open and self._transport is not None:
            self._transport.writelines(encode(CancelPredict(number)))

    def request(
        self,
        message: EndSequence | Profile | Compare | SetThreads,
        timeout: float | None,
        on_answer: Callable[[Any], None],
    ) -> None:
        """Send a message other than a batch; ``on_answer`` receives its only answer."""
        message.number = self._sent = self._sent + 1
        exchange = _Exchange(0, _ANSWERS[type(message)], on_answer, None)
        self._send(message, exchange, timeout, message.number)

    @property
    def has_answered(self) -> bool:
        """Whether the worker has answered a message after the load, even with an error."""
        return self._sent - self._failed > len(self._exchanges)

    @property
    def failure(self) -> ConnectionLost | None:
        """Why the worker cannot answer any more; None while it can."""
        return self.lost.result() if self.lost.done() else None

    def close(self) -> None:
        """Close our end; the worker ends at that. Safe to call twice."""
        self.fail("the connection was closed")

    def fail(self, why: str, kind: type[ConnectionLost] = ConnectionLost) -> None:
        """Close the connection for a reason; later reasons are ignored."""
        self._failed += len(self._exchanges)
        self._exchanges.clear()
        self._probes.clear()
        if self.calls is not None:
            self.calls.close()
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if not self.lost.done():
            self.lost.set_result(kind(why))
            self.on_lost()
        self.resume_writing()
        if self._transport is not None:
            self._transport.abort()

    def reply_to_call(self, reply: CallReply, on_read: Callable[[], object] = lambda: None) -> None:
        """Answer a call of the handler; the timeout of the worker's own answers starts again.

        ``on_read`` is called when the worker has read most of it, or is lost.
        """
        self._on_read.append(on_read)
        if not self.lost.done() and self._transport is not None:
            self._transport.writelines(encode(reply))
            if self._exchanges:
                self._expect_reply()
        if not self._is_paused:
            self.resume_writing()

    def report_read(self, number: int, count: int) -> bool:
        """Report unreported bytes of an answer that are read, if they are many; return if it did.

        The timeout of the worker's own answers starts again.
        """
        if count <= self.stream_window // _REPORTS or number not in self._exchanges:
            return False
        if self._transport is not None:
            self._transport.writelines(encode(PiecesRead(number, count)))
            self._expect_reply()
        return True

    def _send(
        self, message: Message, exchange: _Exchange, timeout: float | None, number: int = _LOAD
    ) -> None:
        if self._transport is None:
            self.fail("not connected")
        if self.lost.done() or self._transport is None:
            return
        buffers = encode(message)
        if sum(map(len, buffers)) <= _JOINED_BYTES:  # a copy costs less than a second write
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)
        if exchange.due > self._max_due:
            self._allow(exchange.due)
        is_first = not self._exchanges
        self._exchanges[number] = exchange
        self._timeout = timeout
        if is_first:
            self._expect_reply()

    def _allow(self, due: int) -> None:
        """Raise the limit of a reply to ``due`` predictions, for larger batches."""
        self._max_due = due
        limit = max(self._max_response_bytes * due, self._max_call_bytes) + _META_BYTES
        self._decoder.max_frame_bytes = min(limit, _MAX_FRAME_BYTES)

    def _expect_reply(self) -> None:
        if self._timeout is None:
            return
        self._deadline = time.monotonic() + self._timeout
        if self._watchdog is None or self._deadline < self._timer_at:
            self._set_watchdog()

    def _set_watchdog(self) -> None:
        # One timer, not one for each message: usually the deadline has moved when it fires, and
        # `_watch` sets it again. The first deadline after a load may be earlier than the timer.
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._timer_at = self._deadline
        self._watchdog = self._loop.call_later(self._deadline - time.monotonic(), self._watch)

    def _watch(self) -> None:
        self._watchdog = None
        if not self._exchanges or self._timeout is None:
            return
        now = time.monotonic()
        has_calls = self.calls is not None and self.calls.has_unanswered
        if has_calls or self.waits_for_reader():
            # The worker may be waiting for the frontend. Calls and clients have deadlines.
            self._deadline = max(self._deadline, now + self._timeout)
        paused = now - self._timer_at
        if paused > _PAUSED_SECONDS:
            # The frontend was stopped, and perhaps the worker too (a frozen container). A reply
            # may be unread: the event loop runs timers before it reads sockets.
            self._deadline = max(self._deadline, now + paused)
        if now >= self._deadline:
            self.fail("Backend worker did not respond in given time", ResponseTimedOut)
        else:
            self._set_watchdog()

    # Called by the event loop, as an asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit it

    def pause_writing(self) -> None:
        """Note that the worker does not read what is written."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Note that the worker has read nearly everything."""
        self._is_paused = False
        on_read, self._on_read = self._on_read, []
        for each in on_read:
            each()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return the buffer for the next bytes."""
        return self._decoder.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Decode received bytes, and pass on the replies that are complete."""
        try:
            messages = self._decoder.received(nbytes)
        except ProtocolError as error:
            self.fail(f"Backend worker broke the protocol: {error}")
            return
        for message in messages:
            try:
                self._receive(message)
            except Exception as error:  # a defect: uvloop would close the transport silently
                kind = type(message).__name__
                logger.exception("%s: a %s message cannot be handled.", self._name, kind)
                self.fail(f"The server failed at a {kind} message: {type(error).__name__}")
                return

    def _receive(self, message: Message) -> None:
        kind = type(message)
        if kind in _CALLS and self.calls is not None:
            self._receive_call(self.calls, message)
            return
        number: int = getattr(message, "number", _LOAD)
        if number < 0:
            self._receive_of_probe(message)
            return
        exchange = self._exchanges.get(number)
        is_last = kind not in _NOT_LAST
        if exchange is None and not is_last and 0 < number <= self._sent:
            return  # a late piece from a thread of the handler, after the answer was complete
        if exchange is None or kind not in exchange.answers:
            self.fail(f"Backend worker sent {kind.__name__} unasked")
            return
        if isinstance(message, _SERIAL) and not _is_valid(message, exchange.due):
            self.fail(f"{len(message.predictions)} predictions came for {exchange.due} inputs")
            return
        if is_last:
            del self._exchanges[number]
        if self._exchanges:  # more answers are due: restart the timeout
            self._expect_reply()
        if is_last and (poison := getattr(message, "poisoned", "")):
            # Before the callback, so that the worker receives no other batch.
            self.fail(f"Backend worker is poisoned: {poison}", Poisoned)
        if isinstance(message, Reply) and message.rows:
            message.predictions = for_each_row(message.predictions, message.rows)
        exchange.on_answer(message)

    def _receive_of_probe(self, message: Message) -> None:
        if isinstance(message, Reply) and (on_reply := self._probes.pop(message.number, None)):
            on_reply(message)

    def _receive_call(self, calls: WorkerCalls, message: Message) -> None:
        if isinstance(message, CancelCall):
            calls.cancel(message.number)
        elif isinstance(message, Call):
            exchange = self._exchanges.get(message.batch)
            calls.begin(exchange and exchange.caller, message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the connection: the worker has closed it, or died."""
        self.fail(f"Worker disconnected. {exc}" if exc else "Worker disconnected.", Disconnected)


def _is_valid(message: Reply | Piece, due: int) -> bool:
    """Return whether a message has a prediction for each input, or an input for each prediction."""
    count = len(message.predictions)
    if message.code != 200:
        return True
    if isinstance(message, Piece):
        return len(message.places) == count and all(0 <= place < due for place in message.places)
    if message.rows:
        return len(message.rows) == count and min(message.rows) > 0 and sum(message.rows) == due
    return count == due
