"""The worker's connection to the frontend: blocking I/O around `backend.framing`."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence

from marserve.backend.errors import FAILED
from marserve.backend.framing import Decoder, encode
from marserve.backend.large_messages import widen
from marserve.backend.protocol import (
    Buffer,
    Compare,
    EndSequence,
    Loaded,
    LoadFailure,
    Message,
    Piece,
    Predict,
    Profile,
    ProtocolError,
    Reply,
    SetThreads,
    WorkerAnswer,
)

logger = logging.getLogger(__name__)

# The frontend limits requests; this only protects the memory from a broken peer.
MAX_REQUEST_FRAME_BYTES = (1 << 32) - 1
_JOINED_BYTES = 64 * 1024
_MAX_BUFFERS = 1024  # of one system call (IOV_MAX)

Work = Predict | EndSequence | Profile | Compare | SetThreads


def _send_all(sock: socket.socket, buffers: Sequence[Buffer]) -> None:
    sent = sock.sendmsg(buffers[:_MAX_BUFFERS])
    for buffer in buffers:
        if sent < len(buffer):
            sock.sendall(memoryview(buffer)[sent:])
        sent = max(0, sent - len(buffer))


def encode_safely(message: Message) -> list[Buffer]:
    """Encode a message; one with values of the handler that cannot be encoded becomes an error."""
    try:
        return encode(message)
    except (ProtocolError, TypeError, ValueError, AttributeError, RecursionError):
        failure: Message
        if isinstance(message, Reply):
            failure = Reply(503, FAILED, number=message.number, poisoned=message.poisoned)
        elif isinstance(message, Piece):
            failure = Piece(code=503, message=FAILED, number=message.number)
        elif isinstance(message, Loaded):
            failure = LoadFailure(500, "The handler's description of the model is not JSON")
        else:
            raise
        logger.exception("%s cannot be sent.", type(message).__name__)
        return encode(failure)


class FrontendConnection:
    """The worker's end of the socket pair to the frontend.

    Messages are received by one thread; any thread of the handler may send.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        widen(sock)
        self._sock = sock
        self._decoder = Decoder(MAX_REQUEST_FRAME_BYTES)
        self._inbox: list[Message] = []
        self._sending = threading.Lock()
        self._owner = os.getpid()

    def receive(self) -> Message | None:
        """Wait for the next message; None when the frontend has closed the connection.

        Raises:
            ProtocolError: The bytes are not a message, or end in the middle of one.
        """
        while not self._inbox:  # no deadline: the frontend's end is seen as EOF
            count = self._sock.recv_into(self._decoder.buffer)
            if count == 0:
                if self._decoder.is_between_frames:
                    return None
                raise ProtocolError("the frontend closed the connection in the middle of a message")
            self._inbox = self._decoder.received(count)
        return self._inbox.pop(0)

    def receive_work(self) -> Work | None:
        """Wait for the next message between two batches; ProtocolError for another."""
        message = self.receive()
        if message is None or isinstance(message, Work):
            return message
        raise ProtocolError(f"{type(message).__name__} is not expected now")

    def send(self, message: Message) -> None:
        """Write a whole message, or an error if it cannot be encoded."""
        if os.getpid() != self._owner:
            os._exit(0)  # a child that the handler forked: it must not use the socket
        buffers = encode_safely(message)
        with self._sending:
            if sum(map(len, buffers)) <= _JOINED_BYTES:  # one system call beats one copy
                self._sock.sendall(b"".join(buffers))
                return
            _send_all(self._sock, buffers)

    def reply(self, number: int, answer: WorkerAnswer) -> None:
        """Send an answer to the message of this number."""
        answer.number = number
        self.send(answer)

    def stop_receiving(self) -> None:
        """End a `receive` in another thread, as if the frontend had closed the connection."""
        with contextlib.suppress(OSError):  # it may be broken
            self._sock.shutdown(socket.SHUT_RD)

    def detach(self) -> socket.socket:
        """Return the socket, between two messages, and stop using it."""
        assert self._decoder.is_between_frames
        assert not self._inbox
        return self._sock
