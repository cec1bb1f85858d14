"""The frontend's connection to one worker: load, predict, with deadlines.

It is an `asyncio.BufferedProtocol`, not a pair of streams: a reply is decoded where it was
received, and its callback is called in the same turn of the event loop. How many batches are sent
at a time is decided in `workers.dispatch`; each reply has the number of its batch.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, cast

from marserve.backend.framing import Decoder, encode
from marserve.backend.protocol import (
    Call,
    CallReply,
    CancelCall,
    EndSequence,
    Load,
    Message,
    Predict,
    Profile,
    ProtocolError,
    Reply,
    SetThreads,
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

# Room in a reply for all but the bodies: headers, metrics, JSON.
_META_BYTES = 16 * 1024 * 1024
_MAX_FRAME_BYTES = (1 << 32) - 1
_JOINED_BYTES = 64 * 1024
# A timer that is so much later than it should be, in seconds, tells of a time without the frontend.
_PAUSED_SECONDS = 0.1
#: The number of the `Load` message; batches are numbered from 1.
_LOAD = 0

OnReply = Callable[[Reply], None]


class WorkerConnection(asyncio.BufferedProtocol):
    """The frontend's end of the socket pair to a worker.

    ``max_response_bytes`` limits each prediction; a reply may have as many predictions as the
    largest batch so far had inputs.

    Attributes:
        lost: Done, with the reason, when the worker cannot answer any more.
        on_lost: Called at that moment.
        overlaps: How many batches its model takes at a time, where stages overlap (`Reply`).
        ends_sequences: Whether its handler wants to know which sequences are over.
        calls: The calls that its handler makes; None for a worker that can make none.
    """

    def __init__(self, max_response_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[ConnectionLost] = self._loop.create_future()
        self.on_lost: Callable[[], object] = lambda: None
        self.overlaps = 0
        self.calls: WorkerCalls | None = None
        self._max_call_bytes = 0
        self.ends_sequences = False
        self._max_response_bytes = max_response_bytes
        self._decoder = Decoder(_META_BYTES)
        self._max_due = 0
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        #: Called when the worker has read what was written.
        self._on_read: list[Callable[[], object]] = []
        #: By message number: how many predictions are due, the callback, and the caller.
        self._exchanges: dict[int, tuple[int, OnReply, Any]] = {}
        #: How many batches were sent, and how many of them will stay without an answer.
        self._batches = self._unanswered = 0
        self._timeout: float | None = None
        self._deadline = 0.0
        self._timer_at = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    @classmethod
    async def from_socket(
        cls, sock: socket.socket, *, max_response_bytes: int
    ) -> "WorkerConnection":
        """Take over our end of the socket pair."""
        loop = asyncio.get_running_loop()
        making = loop.create_task(
            loop.create_connection(lambda: cls(max_response_bytes), sock=sock)
        )
        try:
            _, connection = await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait({making})  # a turn or two; cancelled half-way it would leak
            if not making.exception():
                making.result()[1].close()
            raise
        return connection

    async def load(self, load: Load, timeout: float | None, start_seconds: float) -> Reply:
        """Make the worker load its model, and wait at most ``timeout`` seconds; None for ever.

        The time counts from the moment when loading begins; until then it has ``start_seconds``.
        Raises ConnectionLost if it ended, broke the protocol or did not answer in time.
        """
        reply: asyncio.Future[Reply] = self._loop.create_future()
        has_started = False

        def receive(answer: Reply) -> None:
            nonlocal has_started
            has_started = True
            if not answer.more:
                reply.set_result(answer)
                return
            self._timeout = timeout
            self._expect_reply()

        self._max_call_bytes = load.max_call_bytes
        self._send(load, _LOAD, 0, start_seconds, receive)
        ends: set[asyncio.Future[Any]] = {reply, self.lost}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)  # the watchdog's deadline
        if not has_started and isinstance(self.failure, ResponseTimedOut):
            raise StartTimedOut(start_seconds)
        if reply.done():
            self.overlaps = reply.result().overlaps
            self.ends_sequences = reply.result().ends_sequences
            return reply.result()
        raise self.lost.result()

    def predict(
        self, batch: Predict, timeout: float | None, on_reply: OnReply, caller: Any = None
    ) -> None:
        """Send one batch; ``on_reply`` gets the reply, and before it streamed pieces (``more``).

        ``caller`` is given to `calls` with each call that is made on behalf of the batch.

        It is not called any more once the connection is `lost`. ``timeout`` is the seconds without
        any reply after which the worker counts as hung; None for never. Raises ProtocolError for a
        batch that is too large to be sent.
        """
        batch.number = self._batches = self._batches + 1
        self._send(batch, batch.number, batch.count, timeout, on_reply, caller)

    def end_sequence(self, end: EndSequence, timeout: float | None, on_reply: OnReply) -> None:
        """Tell the handler that a sequence is over; the rest is as of `predict`."""
        end.number = self._batches = self._batches + 1
        self._send(end, end.number, 0, timeout, on_reply)

    def profile(self, message: Profile, timeout: float | None, on_reply: OnReply) -> None:
        """Have the worker run a batch of samples; the rest is as of `predict`."""
        message.number = self._batches = self._batches + 1
        self._send(message, message.number, 0, timeout, on_reply)

    def set_threads(
        self, told: SetThreads, timeout: float | None, on_reply: Callable[[Reply], None]
    ) -> None:
        """Tell the worker to compute with other threads; the rest is as of `predict`."""
        told.number = self._batches = self._batches + 1
        self._send(told, told.number, 0, timeout, on_reply)

    @property
    def has_answered(self) -> bool:
        """Whether the worker has answered at least one batch, be it with an error."""
        return self._batches - self._unanswered > len(self._exchanges)

    @property
    def failure(self) -> ConnectionLost | None:
        """Why the worker cannot answer any more; None while it can."""
        return self.lost.result() if self.lost.done() else None

    def close(self) -> None:
        """Close our end; the worker ends when it notices. Safe to call twice."""
        self.fail("the connection was closed")

    def fail(self, why: str, kind: type[ConnectionLost] = ConnectionLost) -> None:
        """Close the connection for a reason; the first reason counts."""
        self._unanswered += len(self._exchanges)
        self._exchanges.clear()
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
        """Answer a call of the handler; the worker has the time from now on for its own answers.

        ``on_read`` is called when the worker has read most of it, or is lost.
        """
        self._on_read.append(on_read)
        if not self.lost.done() and self._transport is not None:
            self._transport.writelines(encode(reply))
            if self._exchanges:
                self._expect_reply()
        if not self._is_paused:
            self.resume_writing()

    def _send(
        self,
        message: Message,
        number: int,
        due: int,
        timeout: float | None,
        on_reply: OnReply,
        caller: Any = None,
    ) -> None:
        if self._transport is None:
            self.fail("not connected")
        if self.lost.done() or self._transport is None:
            return
        buffers = encode(message)
        if sum(map(len, buffers)) <= _JOINED_BYTES:  # one plain write beats one copy
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)
        if due > self._max_due:
            self._allow(due)
        is_first = not self._exchanges
        self._exchanges[number] = due, on_reply, caller
        self._timeout = timeout
        if is_first:
            self._expect_reply()

    def _allow(self, due: int) -> None:
        """Raise the limit of a reply to ``due`` predictions, because batch sizes may be raised.

        It is never lowered again.
        """
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
        """Set the one timer to the deadline; `_watch` compares it with the deadline of then.

        Deadlines of predictions mostly move on before the timer fires, so that they need no timer
        of their own; the first deadline after a load may be earlier than the timer.
        """
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._timer_at = self._deadline
        self._watchdog = self._loop.call_later(self._deadline - time.monotonic(), self._watch)

    def _watch(self) -> None:
        self._watchdog = None
        if not self._exchanges or self._timeout is None:
            return
        now = time.monotonic()
        if self.calls is not None and self.calls.has_unanswered:
            # The worker may be waiting for us; what it waits for has deadlines of its own.
            self._deadline = max(self._deadline, now + self._timeout)
        paused = now - self._timer_at
        if paused > _PAUSED_SECONDS:
            # The frontend stood still, and the worker perhaps as well (a frozen container). Its
            # reply may be here, unread: timers come before sockets.
            self._deadline = max(self._deadline, now + paused)
        if now >= self._deadline:
            self.fail("Backend worker did not respond in given time", ResponseTimedOut)
        else:
            self._set_watchdog()

    # asyncio.BufferedProtocol, called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def pause_writing(self) -> None:
        """The worker does not read what is written."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The worker has read nearly all."""
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
            self._answer(message)

    def _answer(self, reply: Message) -> None:
        if not isinstance(reply, Reply):
            self._take_call(reply)
            return
        if reply.more and 0 < reply.number <= self._batches and reply.number not in self._exchanges:
            return  # a late piece from a thread of the handler, after the answer was complete
        if reply.number not in self._exchanges:
            self.fail(f"Backend worker answered batch {reply.number} unasked")
            return
        due, on_reply, _ = self._exchanges[reply.number]
        if reply.code == 200 and not _is_complete(reply, due):
            self.fail(f"{len(reply.predictions)} predictions came for {due} inputs")
            return
        if not reply.more:
            del self._exchanges[reply.number]
        if reply.rows:
            reply.predictions = for_each_row(reply.predictions, reply.rows)
        if self._exchanges:  # more replies are due: restart the timeout
            self._expect_reply()
        if reply.poisoned:  # before the callback, so that the worker gets no other batch
            self.fail(f"Backend worker is poisoned: {reply.poisoned}", Poisoned)
        on_reply(reply)

    def _take_call(self, message: Message) -> None:
        if self.calls is not None and isinstance(message, Call):
            exchange = self._exchanges.get(message.batch)
            self.calls.begin(exchange and exchange[2], message)
        elif self.calls is not None and isinstance(message, CancelCall):
            self.calls.cancel(message.number)
        else:
            self.fail(f"Backend worker sent {type(message).__name__} unasked")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the connection: the worker has closed it, or died."""
        self.fail(f"Worker disconnected. {exc}" if exc else "Worker disconnected.", Disconnected)


def _is_complete(reply: Reply, due: int) -> bool:
    """Whether a reply has a prediction for each input, or a valid place for each piece."""
    if not reply.more:
        if reply.rows:
            is_whole = len(reply.rows) == len(reply.predictions) and min(reply.rows) > 0
            return is_whole and sum(reply.rows) == due
        return len(reply.predictions) == due
    return len(reply.predictions) == len(reply.places) and all(
        0 <= place < due for place in reply.places
    )
