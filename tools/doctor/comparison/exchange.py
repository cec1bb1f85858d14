"""A request, and a server that receives requests one after the other."""

import http.client
from collections.abc import Mapping
from dataclasses import dataclass, field

from marserve.tools.bench.client import Answer, Connection, reason
from marserve.tools.bench.generator.destination import Destination

# Headers of a connection, or set for each request; and bodies are compared uncompressed.
_NOT_SENT = {
    "host",
    "connection",
    "content-length",
    "transfer-encoding",
    "expect",
    "keep-alive",
    "accept-encoding",
}


@dataclass(frozen=True)
class Request:
    """A request to both servers.

    Attributes:
        method: HTTP method.
        target: Path and query.
        headers: Without those of the connection and the body's length.
        body: None for a request without body.
        source: The file of the request, perhaps with a line.
    """

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    source: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.target}" + (f" ({self.source})" if self.source else "")


class Server:
    """One of the two servers, with a persistent connection.

    Args:
        destination: The listener.
        headers: Sent with every request; they replace headers of the request.
        timeout: Seconds until the end of a response.
    """

    def __init__(
        self, destination: Destination, headers: Mapping[str, str], timeout: float
    ) -> None:
        self.url = destination.url
        self._headers = headers
        self._connection = Connection(destination, timeout)

    def ask(self, request: Request) -> Answer:
        """Send a request; the response contains the failure, if any.

        Raises:
            BenchError: The request cannot be sent in HTTP.
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
        """Close the connection; the next request opens another one."""
        self._connection.close()
