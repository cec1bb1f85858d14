"""Requests, one server that is asked them one after the other, and its answers."""

import http.client
from collections.abc import Mapping
from dataclasses import dataclass, field

from marserve.tools.bench.client import Answer, Connection, reason
from marserve.tools.bench.generator.destination import Destination

# Of one connection, or made anew for each; and bodies are compared as they are, not compressed.
_NOT_SENT = {
    *("host", "connection", "content-length", "transfer-encoding", "expect", "keep-alive"),
    "accept-encoding",
}


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
        self._headers = headers
        self._connection = Connection(destination, timeout)

    def ask(self, request: Request) -> Answer:
        """Send a request; what goes wrong is told in the answer.

        Raises:
            BenchError: The request cannot be written.
        """
        left_out = {name.lower() for name in self._headers} | _NOT_SENT
        kept = {
            name: value for name, value in request.headers.items() if name.lower() not in left_out
        }
        connection, headers = self._connection, {**kept, **self._headers}
        for is_kept in (connection.sock is not None, False):
            try:
                return connection.exchange(request.method, request.target, request.body, headers)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # An idle connection may be closed by the server at any time.
                if not (is_kept and isinstance(error, ConnectionError)):
                    return Answer(problem=reason(error, connection.seconds))
        raise AssertionError

    def close(self) -> None:
        """Close the connection; the next request makes another."""
        self._connection.close()
