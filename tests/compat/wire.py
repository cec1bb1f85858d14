"""HTTP as it stands on the wire: one request out, one answer in, nothing tidied up.

HTTP libraries hide what a comparison wants to see: the case of header names, an empty reason
phrase, the pieces of a chunked body, interim answers, a connection that is cut.
"""

import contextlib
import socket
from dataclasses import dataclass, field

PATIENCE = 25.0  # seconds for one answer
_BODILESS = (204, 304)
_AFTERMATH = 0.2  # seconds in which bytes that should not be there may come


@dataclass
class Answer:
    """What came back.

    Attributes:
        status: Of the final answer; 0 when there was none.
        reason: Its phrase; where there was no answer, what happened instead.
        headers: Names and values in their order.
        body: Without its framing.
        chunks: The pieces of a chunked body, None for others.
        interim: Status codes of 1xx answers before it.
        cut: Whether the connection ended inside the body.
    """

    status: int = 0
    reason: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    chunks: list[bytes] | None = None
    interim: list[int] = field(default_factory=list)
    cut: bool = False

    def header(self, name: str) -> str | None:
        """The value of a header by its name in any case."""
        return next((value for key, value in self.headers if key.lower() == name), None)


class _Stream:
    """Reads a connection; a reset counts as its end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self.has_ended = False

    def line(self) -> bytes:
        while b"\r\n" not in self._buffer and self._more():
            pass
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return bytes(line)

    def take(self, count: int) -> bytes:
        while len(self._buffer) < count and self._more():
            pass
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def rest(self) -> bytes:
        while self._more():
            pass
        return bytes(self._buffer)

    def rest_in_time(self) -> bytes:
        with contextlib.suppress(TimeoutError):
            self.rest()
        return bytes(self._buffer)

    def _more(self) -> bool:
        try:
            data = self._connection.recv(65536)
        except ConnectionResetError:
            data = b""
        self._buffer += data
        self.has_ended = not data
        return bool(data)


def ask(port: int, *pieces: bytes, method: str = "POST", patience: float = PATIENCE) -> Answer:
    """Send the bytes of a request, read its answer.

    Args:
        port: Of the listener, on 127.0.0.1.
        *pieces: The request. A piece after the first is sent when a 100 has come.
        method: HEAD answers have no body; what comes all the same is kept.
        patience: How long to wait for each read, seconds.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
        try:
            return _talk(connection, pieces, method)
        except TimeoutError:
            return Answer(reason="<no answer in time>")


def _talk(connection: socket.socket, pieces: tuple[bytes, ...], method: str) -> Answer:
    stream = _Stream(connection)
    waiting = list(pieces)
    # A server that refuses early closes while we still send; its answer can be read all the same.
    with contextlib.suppress(ConnectionError):
        connection.sendall(waiting.pop(0))
    interim: list[int] = []
    while True:
        answer = _head(stream)
        if answer.status != 100:
            break
        interim.append(answer.status)
        if waiting:
            connection.sendall(waiting.pop(0))
    answer.interim = interim
    if method == "HEAD" or answer.status in _BODILESS:
        connection.settimeout(_AFTERMATH)
        answer.body = stream.rest_in_time()
    elif answer.status:
        _read_body(stream, answer)
    return answer


def _head(stream: _Stream) -> Answer:
    line = stream.line().decode("latin-1")
    if not line:
        return Answer(reason="<connection closed>")
    _, status, *reason = line.split(" ", 2)
    answer = Answer(int(status), *reason)
    while header := stream.line().decode("utf-8", "surrogateescape"):
        name, _, value = header.partition(":")
        answer.headers.append((name, value.strip()))
    return answer


def _read_body(stream: _Stream, answer: Answer) -> None:
    length = answer.header("content-length")
    if answer.header("transfer-encoding") == "chunked":
        answer.chunks = []
        while size := int(stream.line() or b"0", 16):
            answer.chunks.append(stream.take(size))
            stream.line()
        answer.cut = stream.has_ended
        answer.body = b"".join(answer.chunks)
    elif length is not None:
        answer.body = stream.take(int(length))
        answer.cut = len(answer.body) < int(length)
    else:
        answer.body = stream.rest()


def request(
    method: str, target: str, headers: dict[str, str] | None = None, body: bytes | None = None
) -> bytes:
    """The bytes of a request; a body brings its content-length."""
    lines = {"Host": "127.0.0.1", **(headers or {})}
    if body is not None and "Transfer-Encoding" not in lines:
        lines.setdefault("Content-Length", str(len(body)))
    head = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]
    return "\r\n".join([*head, "", ""]).encode("utf-8", "surrogateescape") + (body or b"")
