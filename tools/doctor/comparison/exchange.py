"""Requests, one server that is asked them one after the other, and its answers."""

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from marserve.tools.bench.client import MAX_ANSWER, Client, deadline
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.doctor.errors import DoctorError

# Of one connection, or made anew for each; and bodies are compared as they are, not compressed.
_NOT_SENT = {
    *("host", "connection", "content-length", "transfer-encoding", "expect", "keep-alive"),
    "accept-encoding",
}
_PIECE = 1 << 20


@dataclass(frozen=True)
class Request:
    """What is sent to both servers.

    Attributes:
        method: Of HTTP.
        target: Path and query.
        headers: Beside those that belong to a connection, and to the body's length.
        body: None for none.
        source: The file, or the line of one, that it is from.
    """

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    source: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.target}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Answer:
    """What a server said, or why it said nothing.

    Attributes:
        status: Of HTTP; 0 for no answer.
        headers: Names in small letters; values of repeated ones are joined.
        body: Whole.
        is_streamed: Whether it came in chunks.
        first: Seconds until its first piece was there.
        seconds: Until all of it was.
        problem: Why there is none.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_streamed: bool = False
    first: float = 0.0
    seconds: float = 0.0
    problem: str = ""

    @property
    def is_success(self) -> bool:
        """Whether the status says so."""
        return 200 <= self.status < 300


class Server:
    """One of the two; its connection is kept, as clients that care for latency keep theirs.

    Args:
        destination: The listener.
        headers: Sent with every request, in the place of the request's own.
        timeout: Seconds that an answer may take.
    """

    def __init__(
        self, destination: Destination, headers: Mapping[str, str], timeout: float
    ) -> None:
        self.url = destination.url
        self._client = Client(destination, timeout=timeout)
        self._headers = headers
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, request: Request) -> Answer:
        """Send a request; what goes wrong is told in the answer.

        Raises:
            DoctorError: The request cannot be written.
        """
        is_kept = self._connection is not None
        try:
            return self._exchange(request)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            self.close()
            if not is_kept:
                return Answer(problem=self._words(error))
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return Answer(problem=self._words(error))
        return self.ask(request)  # an idle connection may be closed by the server at any time

    def close(self) -> None:
        """Close the connection; the next request makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, request: Request) -> Answer:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._client.connection()
            connection.connect()
        headers = self._headers_of(request)
        with deadline(connection, self._timeout):
            began = time.perf_counter()
            try:
                connection.request(request.method, request.target, request.body, headers)
            except (ValueError, http.client.InvalidURL):  # its words would tell the key
                raise DoctorError(
                    f"{request} cannot be sent: its path or a header is wrong."
                ) from None
            with connection.getresponse() as response:
                answer = self._read(response, began)
        length = answer.headers.get("content-length", "")
        if length.isdecimal() and len(answer.body) < int(length) and request.method != "HEAD":
            raise http.client.IncompleteRead(answer.body, int(length) - len(answer.body))
        return answer

    def _headers_of(self, request: Request) -> Mapping[str, str]:
        left_out = {name.lower() for name in self._headers} | _NOT_SENT
        kept = {
            name: value for name, value in request.headers.items() if name.lower() not in left_out
        }
        return kept | {**self._headers}

    def _read(self, response: http.client.HTTPResponse, began: float) -> Answer:
        pieces = [response.read1(_PIECE)]
        first = took = time.perf_counter() - began
        size = 0
        while pieces[-1]:
            if took > self._timeout:  # some streams have no end, and much was sent before it
                raise TimeoutError
            if (size := size + len(pieces[-1])) > MAX_ANSWER:
                raise OSError(0, f"an answer of more than {MAX_ANSWER >> 20} MiB")
            pieces.append(response.read1(_PIECE))
            took = time.perf_counter() - began
        response.read()  # nothing more: it is what makes the connection ready for others
        if response.will_close:
            self.close()
        headers: dict[str, str] = {}
        for name, value in response.getheaders():
            key = name.lower()
            headers[key] = f"{headers[key]}, {value}" if key in headers else value
        is_streamed = headers.get("transfer-encoding", "").lower() == "chunked"
        return Answer(response.status, headers, b"".join(pieces), is_streamed, first, took)

    def _words(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no whole answer within {self._timeout:g} s"
        if isinstance(error, OSError):
            return (error.strerror or str(error) or type(error).__name__).lower()
        return f"that is no HTTP ({type(error).__name__})"
