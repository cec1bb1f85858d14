"""A blocking HTTP client for single requests, such as those to the management interface.

Each request has a deadline for the whole answer, and answers have a limit of size. Redirects are
not followed.
"""

import errno
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marserve.frontend.configuration.addresses import UnixAddress
from marserve.frontend.socket_deadline import socket_deadline
from marserve.tools.bench.errors import BenchError, ServerUnreachable
from marserve.tools.bench.generator.destination import Destination

MAX_ANSWER = 256 << 20  # bytes
#: Bytes of a text or a document that are parsed; values take up to 30 times the memory.
MAX_PARSED = 16 << 20
_MAX_QUOTED = 200  # characters of an answer in a sentence
_PIECE = 1 << 20


@dataclass(frozen=True)
class Answer:
    """The answer of a server.

    Attributes:
        status: Of HTTP; 0 for no answer.
        body: Without chunk headers, and not decompressed.
        headers: Names in lower case; values of repeated headers are joined with commas.
        seconds: From the request on the open connection to the end of the answer.
        first: Seconds from the request to the first piece of the body.
        is_streamed: Whether the body was chunked.
        problem: Why the answer is missing.
    """

    status: int = 0
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    first: float = 0.0
    is_streamed: bool = False
    problem: str = ""

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def is_refusal(self) -> bool:
        """Whether the server has no capacity for the request now: 503 with Retry-After."""
        return self.status == 503 and "retry-after" in self.headers

    def json(self) -> Any:
        """Return the body parsed as JSON; None if it is not JSON, or longer than `MAX_PARSED`."""
        try:
            return json.loads(self.body) if len(self.body) <= MAX_PARSED else None
        except (ValueError, RecursionError):
            return None

    @property
    def text(self) -> str:
        """Return the first `MAX_PARSED` bytes of the body as text."""
        return self.body[:MAX_PARSED].decode(errors="replace")

    @property
    def sentence(self) -> str:
        """Return TorchServe's ``message``, or the beginning of the body, on one line."""
        document = self.json()
        message = document.get("message") if isinstance(document, dict) else None
        words = " ".join((message if isinstance(message, str) else self.text).split())
        return words if len(words) <= _MAX_QUOTED else f"{words[:_MAX_QUOTED]}..."


@dataclass(frozen=True)
class Client:
    """Sends requests to one listener, each on a new connection.

    Attributes:
        destination: The listener.
        headers: Headers of every request.
        timeout: Seconds for opening the connection, and again for the whole answer.
    """

    destination: Destination
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 60.0

    def ask(
        self, method: str, path: str, body: bytes | None = None, timeout: float | None = None
    ) -> Answer:
        """Send a request and return the answer, with any status.

        Raises:
            ServerUnreachable: No answer arrives in time, or it is not HTTP.
            BenchError: The path or a header contains characters that HTTP does not allow.
        """
        seconds = timeout or self.timeout
        connection = Connection(self.destination, seconds)
        try:
            return connection.exchange(method, path, body, self.headers)
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnreachable(
                f"Nothing answers at {self.destination.url}: {reason(error, seconds)}."
            ) from None
        finally:
            connection.close()


class Connection(http.client.HTTPConnection):
    """A connection to a listener; ``seconds`` limits its opening, and each exchange."""

    def __init__(self, destination: Destination, seconds: float) -> None:
        self._address, self._tls, self.seconds = destination.address, destination.tls(), seconds
        if self._tls is not None:
            self.default_port = http.client.HTTPS_PORT
        if isinstance(self._address, UnixAddress):
            super().__init__("localhost", timeout=seconds)
        else:
            super().__init__(self._address.host, self._address.port, timeout=seconds)

    def connect(self) -> None:
        """Open the connection; `exchange` does the TLS handshake, within its deadline."""
        if isinstance(self._address, UnixAddress):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.seconds)
            self.sock.connect(str(self._address.path))
            return
        super().connect()
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(
                self.sock, server_hostname=self._address.host, do_handshake_on_connect=False
            )

    def exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        """Send a request and return the answer.

        Raises:
            OSError, http.client.HTTPException: No complete answer arrives in time.
            BenchError: The path or a header contains characters that HTTP does not allow.
        """
        is_new = self.sock is None
        if is_new:
            self.connect()
        opened = self.sock
        with socket_deadline(self.seconds, lambda: opened):
            if is_new and isinstance(self.sock, ssl.SSLSocket):
                self.sock.do_handshake()
            began = time.perf_counter()
            try:
                self.request(method, path, body, dict(headers))
            except (ValueError, http.client.InvalidURL):  # its message contains the key
                raise BenchError(
                    f"{method} {path} cannot be written: the path or a header, such as the key, "
                    "contains a line break or a character that HTTP does not allow."
                ) from None
            with self.getresponse() as response:
                return _read(response, began)


def _read(response: http.client.HTTPResponse, began: float) -> Answer:
    body = io.BytesIO()  # a list of 2-byte chunks takes 60 times the memory
    piece = response.read1(_PIECE)
    first = time.perf_counter() - began
    while piece:
        if body.tell() + len(piece) > MAX_ANSWER:
            raise OSError(errno.EFBIG, f"an answer of more than {MAX_ANSWER >> 20} MiB")
        body.write(piece)
        piece = response.read1(_PIECE)
    took = time.perf_counter() - began
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    response.read()  # empty here; http.client reuses the connection only after it
    found = response.headers
    headers = {name.lower(): ", ".join(found.get_all(name, ())) for name in found}
    is_streamed = headers.get("transfer-encoding", "").lower() == "chunked"
    return Answer(response.status, body.getvalue(), headers, took, first, is_streamed)


def reason(error: Exception, seconds: float) -> str:
    """Return why no answer arrived within these seconds, as a part of a sentence."""
    if isinstance(error, TimeoutError):
        return f"no whole answer within {seconds:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, OSError):
        text = error.strerror or str(error) or type(error).__name__
        return f"{text[:1].lower()}{text[1:]}"
    return f"the answer is not HTTP ({type(error).__name__})"
