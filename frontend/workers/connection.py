"""The frontend's asyncio shell around the wire to one worker: load, predict, with deadlines.

An `asyncio.BufferedProtocol`, not streams: a reply is decoded where it was received, and whoever
waits for it is called in the same turn of the loop. A worker has at most one message to answer at a
time.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, cast

from marserve.backend.protocol import Decoder, Load, Message, Predict, ProtocolError, Reply, encode

# Room for what describes the bodies of a reply: headers, metrics, the JSON around them.
_META_BYTES = 16 * 1024 * 1024
_JOINED_BYTES = 64 * 1024


class ConnectionLost(Exception):
    """The worker cannot answer any more; says why. Its process has to be replaced."""


class WorkerConnection(asyncio.BufferedProtocol):
    """One end of the socket pair to a worker.

    Args:
        max_reply_bytes: Longest frame the worker may send.

    Attributes:
        lost: Becomes done, with the reason, when the worker cannot answer any more.
        on_lost: Called in that very moment.
    """

    def __init__(self, max_reply_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[ConnectionLost] = self._loop.create_future()
        self.on_lost: Callable[[], None] = _nothing
        self._decoder = Decoder(max_reply_bytes)
        self._transport: asyncio.Transport | None = None
        self._on_reply: Callable[[Reply], None] | None = None
        self._batches = 0
        self._deadline = 0.0
        self._rings_at = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    @classmethod
    async def over(
        cls, sock: socket.socket, *, max_response_bytes: int, batch_size: int
    ) -> "WorkerConnection":
        """Take over our end of the socket pair."""
        loop = asyncio.get_running_loop()
        limit = min(max_response_bytes * batch_size + _META_BYTES, (1 << 32) - 1)
        making = loop.create_task(loop.create_connection(lambda: cls(limit), sock=sock))
        try:
            _, connection = await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait({making})  # a turn or two; half-made it would outlive its socket
            if not making.exception():
                making.result()[1].close()
            raise
        return connection

    async def load(self, load: Load, timeout: float) -> Reply:
        """Have the worker load its model; ``timeout`` seconds until it counts as hung.

        Raises:
            ConnectionLost: The worker ended, broke the protocol or did not answer in time.
        """
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._send(load, timeout, reply.set_result)
        ends: set[asyncio.Future[Any]] = {reply, self.lost}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if reply.done():
            return reply.result()
        raise self.lost.result()

    def predict(self, batch: Predict, timeout: float, on_reply: Callable[[Reply], None]) -> None:
        """Have the worker run one batch; ``on_reply`` gets a code, or a prediction for each input.

        It is not called when the connection is lost first, which `lost` tells.

        Raises:
            ProtocolError: The batch is too large to be sent.
        """
        expected = len(batch.inputs)
        batch.number = self._batches = self._batches + 1

        def checked(reply: Reply) -> None:
            if reply.number != batch.number:
                self.fail(f"Backend worker answered batch {reply.number}, not {batch.number}")
            elif reply.code == 200 and len(reply.predictions) != expected:
                self.fail(f"{len(reply.predictions)} predictions came for {expected} inputs")
            else:
                on_reply(reply)

        self._send(batch, timeout, checked)

    def close(self) -> None:
        """Close our end; the worker ends when it notices. Safe to call twice."""
        self.fail("the connection was closed")

    def fail(self, why: str) -> None:
        """Give the connection up for a reason; the first reason counts."""
        self._on_reply = None
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if not self.lost.done():
            self.lost.set_result(ConnectionLost(why))
            self.on_lost()
        if self._transport is not None:
            self._transport.abort()

    def _send(self, message: Message, timeout: float, on_reply: Callable[[Reply], None]) -> None:
        assert self._on_reply is None, "a worker answers one message at a time"
        if self._transport is None:
            self.fail("not connected")
        if self.lost.done() or self._transport is None:
            return
        buffers = encode(message)
        if sum(map(len, buffers)) <= _JOINED_BYTES:  # one plain write beats one copy
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)
        self._on_reply = on_reply
        self._deadline = time.monotonic() + timeout
        if self._watchdog is None or self._deadline < self._rings_at:
            self._set_watchdog()

    def _set_watchdog(self) -> None:
        """Have one timer ring no later than the deadline.

        When it rings it looks at the deadline of that moment. Those of predictions only move on,
        so a prediction costs no timer of its own as long as they follow each other quickly; the
        first one after a load may have to be sooner.
        """
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._rings_at = self._deadline
        self._watchdog = self._loop.call_later(self._deadline - time.monotonic(), self._watch)

    def _watch(self) -> None:
        self._watchdog = None
        if self._on_reply is None:
            return
        if time.monotonic() >= self._deadline:
            self.fail("Backend worker did not respond in given time")
        else:
            self._set_watchdog()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Called by the loop."""
        return self._decoder.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop."""
        try:
            messages = self._decoder.received(nbytes)
        except ProtocolError as error:
            self.fail(f"Backend worker broke the protocol: {error}")
            return
        if len(messages) > 1:  # one of them would pass for the answer to the next batch
            self.fail(f"Backend worker sent {len(messages)} messages for one")
        elif messages:
            self._answer(messages[0])

    def _answer(self, message: Message) -> None:
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is None or not isinstance(message, Reply):
            self.fail(f"Backend worker sent {type(message).__name__} unasked")
        else:
            on_reply(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.fail(f"Worker disconnected. {exc}" if exc else "Worker disconnected.")


def _nothing() -> None:
    """Nobody wants to know."""
