"""The worker's loop for handlers that are coroutines: many requests under way, one event loop.

The frontend sends each request by itself and does not wait for earlier replies. Replies and pieces
of them leave in whatever order the handler is done with them.
"""

import asyncio
import functools
import logging
import socket
import threading
from typing import cast

from marserve.backend.connection import MAX_REQUEST_FRAME_BYTES, encode_safely
from marserve.backend.framing import Decoder
from marserve.backend.protocol import Message, Predict, ProtocolError, Reply
from marserve.backend.service import Service

logger = logging.getLogger(__name__)


def new_loop() -> asyncio.AbstractEventLoop:
    """The loop that a handler finds, not running yet, while it initialises."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def serve_concurrently(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, service: Service
) -> int:
    """Answer requests until the frontend leaves; returns the exit status.

    The loop is the one that the handler was initialised under; the connection is between two
    messages.
    """
    sock.setblocking(False)
    return loop.run_until_complete(_serve(loop, sock, service))


async def _serve(loop: asyncio.AbstractEventLoop, sock: socket.socket, service: Service) -> int:
    _, connection = await loop.create_connection(lambda: _Connection(service), sock=sock)
    status = await connection.closed  # no deadline: the frontend's end is told by EOF
    await connection.cancel_all()
    return status


class _Connection(asyncio.BufferedProtocol):
    """Starts a task for each request, and sends what becomes of it.

    ``closed`` is the exit status, once the frontend has left or broken the protocol.
    """

    def __init__(self, service: Service) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.closed: asyncio.Future[int] = self._loop.create_future()
        self._service = service
        self._decoder = Decoder(MAX_REQUEST_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def cancel_all(self) -> None:
        """End the requests under way; nobody is left to be answered."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, message: Predict) -> None:
        send = functools.partial(self._send_numbered, message.number)
        try:
            send(await self._service.predict_request(message.inputs[0], send))
        except (KeyboardInterrupt, SystemExit):  # by which the loop and the process end
            raise
        except BaseException:  # foreign code; the client would wait for ever
            if self.closed.done():
                raise
            # A cancellation, say, and not ours: something the handler awaited was cancelled.
            logger.warning("Invoking custom service failed.", exc_info=True)
            send(Reply(503, "Prediction failed"))

    def _send_numbered(self, number: int, reply: Reply) -> None:
        """Send a reply; from any thread, since handlers hand work to threads of their own."""
        reply.number = number
        frame = b"".join(encode_safely(reply))
        if threading.get_ident() == self._thread:
            self._write(frame)
        else:
            self._loop.call_soon_threadsafe(self._write, frame)

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def _close(self, status: int) -> None:
        if not self.closed.done():
            self.closed.set_result(status)
        if self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol, called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is ours."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Where the next bytes go."""
        return self._decoder.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come: begin what is complete."""
        try:
            for message in self._decoder.received(nbytes):
                self._begin(message)
        except ProtocolError:
            logger.exception("Backend worker process died.")
            self._close(1)

    def _begin(self, message: Message) -> None:
        if not isinstance(message, Predict) or len(message.inputs) != 1 or message.run_as > 1:
            raise ProtocolError("a request of its own was expected")
        task = self._loop.create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connection_lost(self, exc: Exception | None) -> None:
        """The frontend has left."""
        logger.info("Frontend disconnected.")
        self._close(0 if exc is None else 1)
