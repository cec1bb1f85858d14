"""A bare HTTP/1.1 client: it sends any bytes, and hides nothing of what comes back."""

import asyncio
import time
from dataclasses import dataclass, field

import httptools


class Lost(Exception):
    """The connection ended before the answer was complete."""


@dataclass
class Answer:
    """What came back for one request."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """The body."""
        return self.body.decode(errors="replace")


class Connection(asyncio.Protocol):
    """A connection to a listener of this machine; answers queue up in the order they come.

    Attributes:
        is_closed: Whether the other side, or we, ended it.
        has_answered: Whether anything ever came.
        current: What came of the answer that is not complete.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.current = Answer()
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()
        self.is_closed = False
        self.has_answered = False

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """Connect; raises OSError where nobody listens."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, "127.0.0.1", port)
        return connection

    def send(self, data: bytes) -> None:
        """Send bytes, whatever they are."""
        if not self.is_closed:
            self.transport.write(data)

    async def answer(self, seconds: float) -> Answer:
        """The next answer.

        Raises:
            Lost: It does not come any more.
            TimeoutError: It did not come in so many seconds.
        """
        async with asyncio.timeout(seconds):
            answer = await self._answers.get()
        if answer is None:
            self._answers.put_nowait(None)
            raise Lost(f"after {len(self.current.body)} bytes of status {self.current.status}")
        return answer

    @property
    def has_unasked_answer(self) -> bool:
        """Whether more came than was waited for."""
        return not self._answers.empty() and not self.is_closed

    def pause_reading(self) -> None:
        """Be a slow reader."""
        if not self.is_closed:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if not self.is_closed:
            self.transport.resume_reading()

    def close(self) -> None:
        """End it at once, whatever is under way."""
        self.transport.abort()
        self.is_closed = True

    # What the event loop and the parser call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            self._answers.put_nowait(Answer(status=-1, body=bytearray(data)))

    def connection_lost(self, _error: Exception | None) -> None:
        """See asyncio."""
        self.is_closed = True
        self._answers.put_nowait(None)

    def on_message_begin(self) -> None:
        """See httptools."""
        self.current = Answer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self.current.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """See httptools."""
        self.current.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """See httptools."""
        self.current.body += data

    def on_message_complete(self) -> None:
        """See httptools."""
        if self.current.status >= 200:
            self.has_answered = True
            self._answers.put_nowait(self.current)
        self.current = Answer()


async def ask(
    port: int, method: str, path: str, headers: str = "", *, seconds: float
) -> tuple[Answer, float]:
    """One request on a connection of its own; its answer, and the seconds that it took."""
    began = time.monotonic()
    connection = await Connection.open(port)
    try:
        connection.send(request_bytes(method, path, headers=headers))
        return await connection.answer(seconds), time.monotonic() - began
    finally:
        connection.close()


def request_bytes(method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
    """A request with a content length; a body without headers is JSON."""
    headers = headers or ("Content-Type: application/json" if body else "")
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"{headers}\r\n" if headers else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunked_bytes(path: str, body: bytes) -> bytes:
    """The same body in two chunks."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    middle = len(body) // 2
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (body[:middle], body[middle:]) if c)
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


def form_bytes(path: str, body: bytes, fields: int = 0) -> bytes:
    """The same body as a file of a form, beside so many other fields."""
    mark = b"--a-boundary"
    part = b'%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    kind = b'; filename="a.json"\r\nContent-Type: application/json'
    parts = [part % (mark, b"body", kind, body)]
    parts += [part % (mark, b"field-%d" % number, b"", b"1") for number in range(fields)]
    content = b"".join(parts) + mark + b"--\r\n"
    return request_bytes(
        "POST", path, content, "Content-Type: multipart/form-data; boundary=a-boundary"
    )
