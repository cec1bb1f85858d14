"""The frontend's end of the connection to a worker for coroutines, in the hands of a test."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fed_decoder import Decoder

from marserve.backend.async_worker import new_loop, serve_concurrently
from marserve.backend.context import Context
from marserve.backend.framing import encode
from marserve.backend.protocol import Input, Load, Message, Part, Predict, Reply
from marserve.backend.service import Service

PATIENCE = 5.0


class Frontend:
    """Sends messages to a worker with a handler, and receives its answers."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = Decoder(1 << 24)
        self._received: list[Message] = []

    def send(self, message: Message) -> None:
        self.send_at_once(message)

    def send_at_once(self, *messages: Message) -> None:
        self._sock.sendall(b"".join(chunk for message in messages for chunk in encode(message)))

    def predict(self, number: int, body: bytes = b"x") -> None:
        self.send(Predict([Input(f"id-{number}", {}, [Part("body", "", body)])], number))

    def receive(self, kind: type[Any]) -> Any:
        while not self._received:
            self._received += self._decoder.feed(self._sock.recv(65536))
        message = self._received.pop(0)
        assert isinstance(message, kind), message
        return message

    def answer(self) -> bytes:
        """The body of the next reply, or its message if it is a failure."""
        reply = self.receive(Reply)
        return bytes(reply.predictions[0].body) if reply.predictions else reply.message.encode()


@contextlib.contextmanager
def serving_handlers(**limits: int) -> Iterator[Callable[[Any], Frontend]]:
    """Yield what starts a worker with a handler; ``limits`` are members of its `Load`."""
    ours, theirs = socket.socketpair()
    ended: list[Future[int]] = []
    context = Context("m", "/m", None, 1, None, "1")
    load = Load("m", "/m", "h", 1, None, True, 1000, "1", **limits)

    def run(handler: Any) -> int:
        loop = new_loop()
        try:
            return serve_concurrently(loop, theirs, Service(handler, context), load)
        finally:
            loop.close()

    with ThreadPoolExecutor(1) as threads, ours, theirs:

        def serve(handler: Any) -> Frontend:
            ended.append(threads.submit(run, handler))
            return Frontend(ours)

        ours.settimeout(PATIENCE)
        yield serve
        ours.shutdown(socket.SHUT_WR)
        assert ended[0].result(PATIENCE) == 0
