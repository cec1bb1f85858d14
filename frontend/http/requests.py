"""Requests over HTTP, as routes get them, and how a plain one is read.

A *plain* request is a POST or PUT of HTTP/1.1 to a path, with a length, that keeps the connection,
has a host, no header twice, none of `_SPECIAL_HEADERS`, and only ASCII in its head. It may expect
100-continue if its body is large, as curl's requests do.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import httptools
from aiohttp import web

from marserve.frontend.errors import ServeError
from marserve.frontend.http.client import ClientConnection
from marserve.frontend.http.responses import HttpResponse, error_response
from marserve.frontend.security.usage import RequestMemory
from marserve.frontend.serving.request_ids import new_request_id
from marserve.frontend.telemetry.trace_context import RequestTrace

#: A longer body is large. Below this size, to receive it in place gains nothing.
LARGE_BYTES = 1 << 19
#: Digits of the largest content-length, 2**64 - 1. llhttp accepts any number of zeros before them.
MAX_LENGTH_DIGITS = 20
# aiohttp refuses more of them.
_MAX_HEADERS = 100
_METHODS: Final = (b"POST", b"PUT")
# They request more than an answer.
_SPECIAL_HEADERS: Final = frozenset(("te", "trailer", "transfer-encoding", "upgrade"))


class HttpRequest:
    """A request whose head aiohttp has read."""

    def __init__(self, raw: web.BaseRequest, connection: ClientConnection) -> None:
        self.arrived = time.monotonic()  # when its head was complete
        self.raw = raw
        self.connection = connection
        self.method = raw.method
        self.target = raw.raw_path
        self.headers: Mapping[str, str] = raw.headers
        self.segments: Sequence[str] = split_path(self.target)
        self.id = new_request_id()
        self.trace: RequestTrace | None = None

    @property
    def memory(self) -> RequestMemory:
        """The bytes that the request keeps in memory."""
        return self.connection.memory

    @property
    def query(self) -> str:
        """The query of the target, as the client wrote it."""
        return self.target.partition("?")[2].partition("#")[0]


@dataclass(slots=True)
class PlainRequest:
    """The head of a plain request; attributes as those of `HttpRequest`."""

    method: str
    target: str
    headers: Mapping[str, str]  # by their names in lower case
    raw_headers: dict[str, str]  # by their names as the client wrote them
    length: int  # of the body, in bytes
    segments: Sequence[str]
    id: str
    arrived: float
    connection: ClientConnection
    waits_for_continue: bool  # whether the client sends the body after an answer 100
    refuse: Callable[[ServeError], HttpResponse] = error_response  # see `Route`
    trace: RequestTrace | None = None

    @property
    def memory(self) -> RequestMemory:
        """The bytes that the request keeps in memory."""
        return self.connection.memory


def split_path(target: str) -> list[str]:
    """Return the decoded path of a request target, split, without empty segments at its end."""
    path = target.partition("?")[0].partition("#")[0]
    if not path.startswith("/"):  # the absolute form that proxies use: http://host/path
        path = "/" + path.partition("://")[2].partition("/")[2]
    if "%" in path:
        path = unquote(path)
    segments = path.split("/")[1:]
    while segments and not segments[-1]:
        segments.pop()
    return segments


class IncomingRequest:
    """The callbacks of httptools: the received part of a request, as the client wrote it."""

    def __init__(self) -> None:
        self.has_more = False  # whether the bytes contain another request after this one
        self.reset()

    def reset(self) -> None:
        """Prepare for the next request."""
        self._has_begun = False
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body_bytes = 0
        self._body: list[bytes] = []
        self.has_head = self.is_complete = False

    def take_body(self) -> bytes:
        """Return the body of a complete request, and reset."""
        body = self._body
        self.reset()
        return body[0] if len(body) == 1 else b"".join(body)

    def on_message_begin(self) -> None:
        """Note that a request begins; called by the parser, as all methods that follow."""
        self.has_more = self._has_begun
        self._has_begun = True

    def on_url(self, url: bytes) -> None:
        """Add a part of the target."""
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Note that the head is complete."""
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        self._body.append(body)
        self.body_bytes += len(body)

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        self.is_complete = True


def _may_wait(expectation: str, length: int) -> bool:
    return expectation.lower() == "100-continue" and length > LARGE_BYTES


def plain_request(
    connection: ClientConnection, parser: httptools.HttpRequestParser, incoming: IncomingRequest
) -> PlainRequest | None:
    """Return the request whose head has arrived; None if it is not plain."""
    method, headers = parser.get_method(), incoming.headers
    if method not in _METHODS or parser.get_http_version() != "1.1" or len(headers) > _MAX_HEADERS:
        return None
    raw_headers: dict[str, str] = {}
    by_name: dict[str, str] = {}
    try:
        target = incoming.target.decode("ascii")
        for name, value in headers:
            if value.endswith((b" ", b"\t")):  # aiohttp 3.11 keeps the blanks, later ones do not
                return None
            key, text = name.decode("ascii"), value.decode("ascii")
            raw_headers[key] = by_name[key.lower()] = text
    except UnicodeDecodeError:
        return None
    length = by_name.get("content-length", "")
    expectation = by_name.pop("expect", "")
    if expectation:  # handlers do not see it
        raw_headers = {key: raw_headers[key] for key in raw_headers if key.lower() != "expect"}
    if (
        not target.startswith("/")
        or not length.isdecimal()
        or len(length) > MAX_LENGTH_DIGITS
        or len(by_name) + bool(expectation) != len(headers)
        or (expectation and not _may_wait(expectation, int(length)))
        or not _SPECIAL_HEADERS.isdisjoint(by_name)
        or "host" not in by_name
        or by_name.get("connection", "keep-alive").lower() != "keep-alive"
    ):
        return None
    return PlainRequest(
        method.decode(),
        target,
        by_name,
        raw_headers,
        int(length),
        split_path(target),
        new_request_id(),
        time.monotonic(),
        connection,
        bool(expectation),
    )
