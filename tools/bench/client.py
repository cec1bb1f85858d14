"""One request after the other: to ask a server who it is, and to change what it serves."""

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from marserve.frontend.configuration.addresses import UnixAddress
from marserve.tools.bench.errors import BenchError, ServerUnreachable
from marserve.tools.bench.generator.destination import Destination

#: Bytes of an answer that are read.
MAX_ANSWER = 256 << 20
_MAX_QUOTED = 200  # characters of an answer in a sentence


@dataclass(frozen=True)
class Answer:
    """What a server message.

    Attributes:
        status: HTTP status.
        body: As it came.
        headers: Names in small letters.
        seconds: From the request, the connection being open, to the end of the answer.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]
    seconds: float

    @property
    def is_success(self) -> bool:
        """Whether the status says so."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def sentence(self) -> str:
        """What the server says in words: TorchServe's ``message``, or the beginning of the body."""
        document = self.json()
        message = document.get("message") if isinstance(document, dict) else None
        text = message if isinstance(message, str) else self.body.decode(errors="replace")
        words = " ".join(text.split())
        return words if len(words) <= _MAX_QUOTED else f"{words[:_MAX_QUOTED]}..."


@dataclass(frozen=True)
class Client:
    """Asks one listener; each request has a connection of its own.

    Attributes:
        destination: The listener.
        headers: Sent with every request.
        timeout: Seconds that a request may take.
    """

    destination: Destination
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 60.0

    def ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """Ask; any status is an answer.

        Raises:
            ServerUnreachable: Nobody answers, or not in HTTP.
            BenchError: The request cannot be written.
        """
        connection = self.connection()
        try:
            connection.connect()
            with deadline(connection, self.timeout):
                began = time.perf_counter()
                self._send(connection, method, path, body)
                with connection.getresponse() as response:
                    read = response.read(MAX_ANSWER)
                took = time.perf_counter() - began
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnreachable(
                f"Nothing answers at {self.destination.url}: {_reason(error)}."
            ) from None
        finally:
            connection.close()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, read, headers, took)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> None:
        try:
            connection.request(method, path, body, dict(self.headers))
        except (ValueError, http.client.InvalidURL):  # its words would tell the key
            raise BenchError(
                f"The request to {self.destination.url} cannot be written: its path or a header, "
                "such as the key, has a line break in it, or a letter that HTTP does not know."
            ) from None

    def connection(self) -> http.client.HTTPConnection:
        """A connection, not opened yet."""
        address = self.destination.address
        if isinstance(address, UnixAddress):
            return _UnixConnection(str(address.path), self.timeout)
        if (tls := self.destination.tls()) is not None:
            return http.client.HTTPSConnection(
                address.host, address.port, timeout=self.timeout, context=tls
            )
        return http.client.HTTPConnection(address.host, address.port, timeout=self.timeout)


@contextmanager
def deadline(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """Shut an open connection when the time is over, however much of the answer still comes.

    The timeout of a socket begins anew with each byte.

    Raises:
        TimeoutError: It was shut.
    """
    opened, is_over = connection.sock, threading.Event()

    def end() -> None:
        is_over.set()
        with suppress(OSError):
            opened.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()
    if is_over.is_set():
        raise TimeoutError("timed out")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return f"that is no HTTP ({type(error).__name__})"
