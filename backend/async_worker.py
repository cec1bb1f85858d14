"""Serves handlers that are coroutines: many requests at a time on one event loop.

The frontend sends each request alone and does not wait for earlier replies. Replies and pieces are
sent as the handler finishes them.
"""

import asyncio
import functools
import logging
import socket
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any, cast

from marserve.backend.batch_run import Send
from marserve.backend.calls import HandlerCalls, RequestCalls, unchanging
from marserve.backend.connection import MAX_REQUEST_FRAME_BYTES, encode_safely
from marserve.backend.errors import FAILED
from marserve.backend.framing import Decoder
from marserve.backend.protocol import (
    CallReply,
    CancelPredict,
    EndSequence,
    Load,
    Message,
    Piece,
    PiecesRead,
    Predict,
    ProtocolError,
    Reply,
)
from marserve.backend.service import Service
from marserve.backend.stream_credit import StreamCredit

logger = logging.getLogger(__name__)


def new_loop() -> asyncio.AbstractEventLoop:
    """Create and set the event loop in which the handler is initialised."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def serve_concurrently(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, service: Service, load: Load
) -> int:
    """Answer requests until the frontend closes the connection; return the exit status."""

    async def serve() -> int:
        _, connection = await loop.create_connection(lambda: _Connection(service, load), sock=sock)
        status = await connection.closed  # no deadline: the frontend's end is seen as EOF
        await connection.cancel_all()
        return status

    sock.setblocking(False)
    return loop.run_until_complete(serve())


class _Connection(asyncio.BufferedProtocol):
    """Starts a task for each request, and sends its reply."""

    def __init__(self, service: Service, load: Load) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        #: The exit status, when the frontend has left or broken the protocol.
        self.closed: asyncio.Future[int] = self._loop.create_future()
        self._service = service
        self._decoder = Decoder(MAX_REQUEST_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._stream_window = load.stream_window
        #: By number of the message.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._credits: dict[int, StreamCredit] = {}
        self._is_paused = False
        self._unsent: deque[list[bytes]] = deque()
        self._calls = HandlerCalls(load.max_call_bytes, self._write)
        #: By id of a sequence: the running call of the handler for its end.
        self._ending: dict[str, asyncio.Task[None]] = {}

    async def cancel_all(self) -> None:
        """Cancel the running requests: their clients are gone."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, message: Predict) -> None:
        send = functools.partial(self._send_numbered, message.number)
        credit = self._credits[message.number] = StreamCredit(self._stream_window)
        calls = RequestCalls(self._calls, message.number, credit.drain)
        try:
            send(await self._reply_of(self._predict(message, send, calls)))
        finally:
            calls.close()
            credit.close()
            del self._credits[message.number]

    async def _predict(self, message: Predict, send: Send, calls: RequestCalls) -> Reply:
        if self._ending:  # a new sequence starts when the handler has ended the old one
            sequence = message.inputs[0].headers.get(self._service.context.header_key_sequence_id)
            if ending := self._ending.get(sequence or ""):
                await asyncio.wait({ending})  # no deadline: the frontend has one for its answer
        return await self._service.predict_request(message, send, calls)

    async def _reply_of(self, call: Coroutine[Any, Any, Reply]) -> Reply:
        """Return a reply in any case: the frontend waits for one."""
        try:
            return await call
        except (KeyboardInterrupt, SystemExit):  # these end the loop and the process
            raise
        except BaseException:  # foreign code
            if self.closed.done():
                raise
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # else by `CancelPredict`
                # For example a cancellation by the handler, of something that it awaited.
                logger.warning("Invoking custom service failed.", exc_info=True)
            return Reply(503, FAILED)

    def _send_numbered(self, number: int, reply: Reply | Piece) -> None:
        """Send a reply from any thread, since handlers may use threads."""
        reply.number = number
        frame = unchanging(encode_safely(reply))
        if threading.get_ident() == self._thread:
            self._write_reply(reply, frame)
        else:
            self._loop.call_soon_threadsafe(self._write_reply, reply, frame)

    def _write_reply(self, reply: Reply | Piece, frame: list[bytes]) -> None:
        if type(reply) is Piece and (credit := self._credits.get(reply.number)):
            for each in reply.predictions:
                credit.add(len(each.body))
        self._write(frame)

    def _write(self, frame: list[bytes]) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._is_paused:
            # Not to the transport, which would append to one buffer and move it at each write.
            self._unsent.append(frame)
        else:
            self._transport.writelines(frame)

    def _close(self, status: int) -> None:
        if not self.closed.done():
            self.closed.set_result(status)
        if self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol, called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return the buffer for the next bytes."""
        return self._decoder.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Start the requests that are complete, and pass on replies of calls."""
        try:
            for message in self._decoder.received(nbytes):
                if isinstance(message, CallReply):
                    self._calls.replied(message)
                elif isinstance(message, CancelPredict):
                    if task := self._tasks.get(message.number):
                        # Not at once: a task that has not run yet would end without a reply.
                        self._loop.call_soon(task.cancel)
                elif isinstance(message, PiecesRead):
                    if credit := self._credits.get(message.number):
                        credit.add(-message.count)
                else:
                    self._begin(message)
        except ProtocolError:
            logger.exception("Backend worker process died.")
            self._close(1)

    async def _end_sequence(self, message: EndSequence) -> None:
        try:
            reply = await self._reply_of(self._service.end_sequence_async(message))
        finally:
            del self._ending[message.sequence_id]
        self._send_numbered(message.number, reply)

    def _begin(self, message: Message) -> None:
        if isinstance(message, EndSequence):
            task = self._loop.create_task(self._end_sequence(message))
            self._ending[message.sequence_id] = task
        elif isinstance(message, Predict) and len(message.inputs) == 1 and message.run_as <= 1:
            task = self._loop.create_task(self._answer(message))
        else:
            raise ProtocolError("a single request was expected")
        self._tasks[message.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(message.number))

    def pause_writing(self) -> None:
        """Keep frames: the socket accepts no more for now."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Send the kept frames."""
        self._is_paused = False
        while self._unsent and not self._is_paused:
            self._write(self._unsent.popleft())

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop serving: the frontend has closed the connection, or died."""
        logger.info("Frontend disconnected.")
        self._close(0 if exc is None else 1)
