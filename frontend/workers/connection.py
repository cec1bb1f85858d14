"""The frontend's connection to one worker: load, predict, with deadlines.

An `asyncio.BufferedProtocol`, not streams: a reply is decoded where it was received, and whoever
waits for it is called in the same turn of the loop. How many messages a worker has to answer at a
time is for others to say (`workers.dispatch`); every reply bears the number of its batch.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, cast

from marserve.backend.framing import Decoder, encode
from marserve.backend.protocol import Load, Message, Predict, ProtocolError, Reply
from marserve.frontend.workers.failures import (
    ConnectionLost,
    Disconnected,
    Poisoned,
    ResponseTimedOut,
)

# Room for what describes the bodies of a reply: headers, metrics, the JSON around them.
_META_BYTES = 16 * 1024 * 1024
_MAX_FRAME_BYTES = (1 << 32) - 1
_JOINED_BYTES = 64 * 1024
#: The number of a `Load`; those of batches begin behind it.
_LOAD = 0

OnReply = Callable[[Reply], None]


class WorkerConnection(asyncio.BufferedProtocol):
    """One end of the socket pair to a worker.

    ``max_response_bytes`` limits each prediction; a reply may have as many of them as the largest
    batch had inputs that the worker got so far.

    Attributes:
        lost: Becomes done, with the reason, when the worker cannot answer any more.
        on_lost: Called in that very moment.
        overlaps: Whether the worker has several batches under way at a time (`Reply.overlaps`).
    """

    def __init__(self, max_response_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[ConnectionLost] = self._loop.create_future()
        self.on_lost: Callable[[], object] = lambda: None
        self.overlaps = False
        self._max_response_bytes = max_response_bytes
        self._decoder = Decoder(_META_BYTES)
        self._max_due = 0
        self._transport: asyncio.Transport | None = None
        #: By the number of what was sent: how many predictions are due, and who gets them.
        self._exchanges: dict[int, tuple[int, OnReply]] = {}
        #: How many batches were sent, and how many of them will never be answered.
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
            await asyncio.wait({making})  # a turn or two; half-made it would outlive its socket
            if not making.exception():
                making.result()[1].close()
            raise
        return connection

    async def load(self, load: Load, timeout: float | None) -> Reply:
        """Have the worker load its model; ``timeout`` seconds until it counts as hung, or never.

        Raises ConnectionLost if it ended, broke the protocol or did not answer in time.
        """
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._send(load, _LOAD, 0, timeout, reply.set_result)
        ends: set[asyncio.Future[Any]] = {reply, self.lost}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)  # the watchdog's deadline
        if reply.done():
            self.overlaps = reply.result().overlaps
            return reply.result()
        raise self.lost.result()

    def predict(self, batch: Predict, timeout: float | None, on_reply: OnReply) -> None:
        """Have the worker run one batch; ``on_reply`` gets a code, or a prediction for each input.

        Before that it may get pieces, replies that say ``more``. It is not called any more when the
        connection is lost, which `lost` tells. ``timeout`` is the seconds without any reply after
        which the worker counts as hung; None for ever. A batch too large to be sent is a
        ProtocolError.
        """
        batch.number = self._batches = self._batches + 1
        self._send(batch, batch.number, len(batch.inputs), timeout, on_reply)

    @property
    def has_answered(self) -> bool:
        """Whether the worker has answered a batch, be it by an error of its handler."""
        return self._batches - self._unanswered > len(self._exchanges)

    def close(self) -> None:
        """Close our end; the worker ends when it notices. Safe to call twice."""
        self.fail("the connection was closed")

    def fail(self, why: str, kind: type[ConnectionLost] = ConnectionLost) -> None:
        """Give the connection up for a reason; the first reason counts."""
        self._unanswered += len(self._exchanges)
        self._exchanges.clear()
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if not self.lost.done():
            self.lost.set_result(kind(why))
            self.on_lost()
        if self._transport is not None:
            self._transport.abort()

    def _send(
        self, message: Message, number: int, due: int, timeout: float | None, on_reply: OnReply
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
        self._exchanges[number] = due, on_reply
        self._timeout = timeout
        if is_first:
            self._expect_reply()

    def _allow(self, due: int) -> None:
        """Let replies have so many predictions: the size of batches may be raised while it serves.

        It is never lowered again: what a worker was allowed once is no danger later.
        """
        self._max_due = due
        limit = self._max_response_bytes * due + _META_BYTES
        self._decoder.max_frame_bytes = min(limit, _MAX_FRAME_BYTES)

    def _expect_reply(self) -> None:
        """The worker owes us something: from now on its silence counts."""
        if self._timeout is None:
            return
        self._deadline = time.monotonic() + self._timeout
        if self._watchdog is None or self._deadline < self._timer_at:
            self._set_watchdog()

    def _set_watchdog(self) -> None:
        """Have one timer run out no later than the deadline, and look at it again then.

        Deadlines of predictions only move on, so that none costs a timer of its own as long as they
        follow each other quickly; the first one after a load may have to be sooner.
        """
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._timer_at = self._deadline
        self._watchdog = self._loop.call_later(self._deadline - time.monotonic(), self._watch)

    def _watch(self) -> None:
        self._watchdog = None
        if not self._exchanges or self._timeout is None:
            return
        if time.monotonic() >= self._deadline:
            self.fail("Backend worker did not respond in given time", ResponseTimedOut)
        else:
            self._set_watchdog()

    # asyncio.BufferedProtocol, called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is ours."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Where the next bytes go."""
        return self._decoder.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come: hand over the replies that are complete."""
        try:
            messages = self._decoder.received(nbytes)
        except ProtocolError as error:
            self.fail(f"Backend worker broke the protocol: {error}")
            return
        for message in messages:
            self._answer(message)

    def _answer(self, reply: Message) -> None:
        if not isinstance(reply, Reply):
            self.fail(f"Backend worker sent {type(reply).__name__} unasked")
            return
        if reply.more and 0 < reply.number <= self._batches and reply.number not in self._exchanges:
            return  # a piece that a thread of the handler sent when the answer was complete
        if reply.number not in self._exchanges:  # it would pass for the answer to another batch
            self.fail(f"Backend worker answered batch {reply.number} unasked")
            return
        due, on_reply = self._exchanges[reply.number]
        if reply.code == 200 and not _is_complete(reply, due):
            self.fail(f"{len(reply.predictions)} predictions came for {due} inputs")
            return
        if not reply.more:
            del self._exchanges[reply.number]
        if self._exchanges:  # it has more to answer, and has just shown that it lives
            self._expect_reply()
        if reply.poisoned:  # first, so that nobody gives it another batch
            self.fail(f"Backend worker is poisoned: {reply.poisoned}", Poisoned)
        on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """The worker has left."""
        self.fail(f"Worker disconnected. {exc}" if exc else "Worker disconnected.", Disconnected)


def _is_complete(reply: Reply, due: int) -> bool:
    """Whether a reply has a prediction for each input, or each of its pieces a place."""
    if not reply.more:
        return len(reply.predictions) == due
    return len(reply.predictions) == len(reply.places) and all(
        0 <= place < due for place in reply.places
    )
