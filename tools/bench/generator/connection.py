"""A keep-alive HTTP/1.1 connection with one request in flight, and its connector.

Of an answer only the status and the end are parsed, because the load generator shares the machine
with the server. httptools (llhttp in C) takes less time than a search for the content length in
Python, and supports chunks, interim answers and bodies that end with their connection.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import httptools

from marserve.frontend.configuration.addresses import UnixAddress
from marserve.tools.bench.generator.destination import Destination

_FRAMING = (b"content-length", b"transfer-encoding")
_SUCCESS = range(200, 300)
#: The kind of a refusal: 503 with a Retry-After header, which the 503 of a failed handler lacks.
REFUSED = "503 refused"
_MAX_HEAD = 256 << 10  # bytes; the parser keeps a header until its end
_MAX_ANSWER = 256 << 20  # bytes


class Answers(Protocol):
    """The receiver of the results of requests."""

    def answered(self, connection: "Connection", due: float, kind: str) -> None:
        """Receive the end of the request that was due at this moment.

        The connection may be used again unless it ``is_closed``.

        Args:
            connection: The connection of the request.
            due: When the request was due.
            kind: Empty for a success, else the status, or `REFUSED`.
        """

    def failed(self, connection: "Connection", due: float, kind: str) -> None:
        """Receive the failure of the request that was due then; its connection is closed."""


class Connection(asyncio.Protocol):
    """A connection of the load generator.

    Args:
        answers: Receives the results of requests.

    Attributes:
        due: When the request in flight was due; 0 without one.
        is_closed: Whether no further request can be sent.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._parser = httptools.HttpResponseParser(self)
        self._is_framed = False  # the answer has a length or chunks
        self._has_retry_after = False
        self._is_body = False
        self._size = 0  # bytes of the answer so far
        self.due = 0.0
        self.is_closed = False

    def send(self, request: bytes, due: float) -> None:
        """Send a request; there must be none in flight.

        It fails if the server has closed the connection, at once or when the event loop reports it.
        """
        self.due = due
        if self.is_closed:
            self._fail("connection closed")
        elif not self._transport.is_closing():
            self._transport.write(request)

    def abort(self, kind: str) -> None:
        """Close the connection at once; the request in flight fails."""
        self._transport.abort()
        self._fail(kind)

    def close(self) -> None:
        """Close the connection after the last answer."""
        self.is_closed = True
        self._transport.close()

    # Called by the event loop

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse a part of an answer."""
        self._size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if isinstance(error, httptools.HttpParserCallbackError):
                raise  # an error in a callback
            self.abort("malformed answer")
        if self._size > (_MAX_ANSWER if self._is_body else _MAX_HEAD):
            self.abort("answer too large")

    def connection_lost(self, error: Exception | None) -> None:
        """Complete or fail the request in flight."""
        if self.due and self._is_body and not self._is_framed and error is None:
            self.is_closed = True
            self._complete()  # this body ended with its connection
        else:
            self._fail("connection closed" if error is None else "connection reset")

    # Called by the parser

    def on_header(self, name: bytes, _value: bytes) -> None:
        """Look for headers that determine the end or the kind of the answer."""
        lower = name.lower()
        if lower in _FRAMING:
            self._is_framed = True
        elif lower == b"retry-after":
            self._has_retry_after = True

    def on_headers_complete(self) -> None:
        """Start the body."""
        self._is_body = True

    def on_message_complete(self) -> None:
        """Complete the request, unless the answer is an interim one."""
        if self._parser.get_status_code() < 200:  # an interim answer: 100, 103
            self._start_answer()
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._complete()

    def _complete(self) -> None:
        kind = self._kind()
        self._start_answer()
        self._size = 0
        due, self.due = self.due, 0.0
        if due:  # else the server sent an answer without a request
            self._answers.answered(self, due, kind)

    def _start_answer(self) -> None:
        self._is_body = self._is_framed = self._has_retry_after = False

    def _kind(self) -> str:
        status = self._parser.get_status_code()
        if status in _SUCCESS:
            return ""
        return REFUSED if status == 503 and self._has_retry_after else str(status)

    def _fail(self, kind: str) -> None:
        self.is_closed = True
        due, self.due = self.due, 0.0
        if due:
            self._answers.failed(self, due, kind)


class Connector:
    """Opens connections to a destination.

    Args:
        destination: The address of the server.
        answers: Receives the results of the requests on the connections.
        timeout: Seconds for opening a connection.
    """

    def __init__(self, destination: Destination, answers: Answers, timeout: float) -> None:
        self._address = destination.address
        self._tls = destination.tls()
        self._make: Callable[[], Connection] = lambda: Connection(answers)
        self._timeout = timeout

    async def open(self) -> Connection:
        """Open a connection.

        Raises:
            OSError: It cannot be opened; `ConnectionRefusedError` without a listener.
        """
        opening = asyncio.ensure_future(self._open())
        try:
            await asyncio.wait({opening}, timeout=self._timeout)
            if not opening.done():
                raise TimeoutError(f"no connection within {self._timeout:g} s")
            return opening.result()
        finally:
            opening.cancel()

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        address = self._address
        if isinstance(address, UnixAddress):
            _, opened = await loop.create_unix_connection(self._make, str(address.path))
            return opened
        name = address.host if self._tls else None
        _, opened = await loop.create_connection(
            self._make, address.host, address.port, ssl=self._tls, server_hostname=name
        )
        return opened
