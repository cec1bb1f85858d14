"""What goes out: predictions, JSON documents and errors as HTTP responses.

They are written here, whichever way the request came: status line, headers and body in one go.
TorchServe's clients see the headers they know: no ``content-type`` unless a handler set one, an
empty reason phrase on predictions, the caching headers on everything.
"""

import asyncio
import http
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from marserve.backend.protocol import Buffer, Prediction
from marserve.frontend.batching.jobs import Stream, StreamBroken
from marserve.frontend.errors import Overloaded, PredictionFailed, ServeError

logger = logging.getLogger(__name__)

_NO_CACHE = (
    "Pragma: no-cache\r\n"
    "Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
    "Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
# The framing of a response is the server's, and a handler that sets it would break it; that nobody
# caches an answer is the server's word too.
_SERVER_HEADERS = frozenset(
    {
        *("connection", "content-length", "transfer-encoding", "x-request-id"),
        *("pragma", "cache-control", "expires"),
    }
)
_JSON_HEADERS = {"content-type": "application/json"}
_JOINED_BYTES = 64 * 1024
# RFC 9110, section 5.6.2 (token) and 5.5 (field value; any text but control characters).
_FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FIELD_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]*")
_NO_CONTENT = 204
_WITHOUT_BODY = (_NO_CONTENT, 304)
# Python 3.13 has renamed that of 413.
_PHRASES = {status.value: status.phrase for status in http.HTTPStatus} | {
    413: "Request Entity Too Large"
}
_NO_MEMBERS: Mapping[str, str] = {}


@dataclass(slots=True)
class HttpResponse:
    """A response: its body, or the stream of its pieces.

    Attributes:
        status: HTTP status.
        body: The body; empty for a stream.
        headers: Besides those every answer has.
        reason: Phrase of the status line; None for the standard one.
        stream: The pieces of the body; closed by whoever writes it.
    """

    status: int
    body: Buffer = b""
    headers: Mapping[str, str] | None = None
    reason: str | None = None
    stream: Stream | None = None


def write_response(
    transport: asyncio.WriteTransport,
    answer: HttpResponse | Prediction,
    request_id: str,
    common_headers: str,
    *,
    keep_alive: bool,
    with_body: bool = True,
) -> None:
    """Write a response whose body is known, in one piece where copying it costs less.

    Args:
        transport: Where to.
        answer: What to write.
        request_id: Sent as ``x-request-id`` when not empty.
        common_headers: Header lines of every answer.
        keep_alive: Whether the connection stays.
        with_body: Whether the client wants the body.
    """
    if transport.is_closing():  # uvloop refuses to write
        return
    status, body = answer.status, answer.body
    length = "" if status == _NO_CONTENT else f"content-length: {len(body)}\r\n"
    head = _head(answer, request_id, common_headers, length, keep_alive=keep_alive)
    if not body or not with_body or status in _WITHOUT_BODY:
        transport.write(head)  # a client would take a body for the next answer
    elif len(body) <= _JOINED_BYTES:
        transport.write(head + body)
    else:
        transport.writelines([head, body])


async def write_stream(
    transport: asyncio.WriteTransport,
    drain: Callable[[], Awaitable[None]],
    answer: HttpResponse,
    request_id: str,
    common_headers: str,
    *,
    keep_alive: bool,
    chunked: bool,
    with_body: bool,
) -> bool:
    """Write a response piece by piece, as they come.

    Args:
        transport: Where to.
        drain: Waits for a client that reads slowly.
        answer: Its stream is closed at the end.
        request_id: Sent as ``x-request-id``.
        common_headers: Header lines of every answer.
        keep_alive: Whether the connection stays.
        chunked: Whether the pieces are chunks; else the end of the connection is theirs.
        with_body: Whether the client wants the body.

    Returns:
        Whether the connection stays.
    """
    stream = answer.stream
    assert stream is not None
    has_body = with_body and answer.status not in _WITHOUT_BODY
    framing = ""
    if chunked and answer.status not in _WITHOUT_BODY:
        framing = "transfer-encoding: chunked\r\n"
    stream.on_behind = partial(_break_off, transport, "the client is too slow")
    try:
        if not transport.is_closing():
            head = _head(answer, request_id, common_headers, framing, keep_alive=keep_alive)
            transport.write(head)
        async for piece in stream.pieces():
            if transport.is_closing():  # uvloop refuses to write
                return False
            if piece and has_body:
                transport.writelines(_chunk(piece) if chunked else (piece,))
                await drain()
        if chunked and has_body and not transport.is_closing():
            transport.write(b"0\r\n\r\n")
    except StreamBroken as error:
        # Without the last chunk, so that the client does not take it for complete.
        _break_off(transport, str(error))
        return False
    finally:
        stream.close()
    return keep_alive


def _chunk(piece: Buffer) -> Sequence[Buffer]:
    return b"%x\r\n" % len(piece), piece, b"\r\n"


def _break_off(transport: asyncio.WriteTransport, why: str) -> None:
    if not transport.is_closing():
        logger.warning("An answer was broken off: %s", why)
        transport.abort()


def _head(
    answer: HttpResponse | Prediction,
    request_id: str,
    common_headers: str,
    framing: str,
    *,
    keep_alive: bool,
) -> bytes:
    """The head of a response; ``framing`` is the header line that tells where its body ends."""
    status, reason = answer.status, answer.reason
    if reason is None:
        reason = _PHRASES.get(status, "")
    named = f"x-request-id: {request_id}\r\n" if request_id else ""
    own = _header_lines(answer.headers) if answer.headers else ""
    end = "keep-alive" if keep_alive else "close"
    head = (
        f"HTTP/1.1 {status} {reason}\r\n"
        f"{named}{common_headers}{own}{framing}connection: {end}\r\n\r\n"
    )
    try:
        return head.encode("latin-1")  # as clients read it
    except UnicodeEncodeError:  # it says more than Latin-1 can
        return head.encode("utf-8", "replace")


def _header_lines(headers: Mapping[str, str]) -> str:
    lines = [f"{k}: {v}\r\n" for k, v in headers.items() if k.lower() not in _SERVER_HEADERS]
    return "".join(lines)


def common_headers(cors: Mapping[str, str | None]) -> str:
    """The header lines every answer of a listener carries.

    Args:
        cors: CORS header names to configured values; those without a value are left out.
    """
    return _NO_CACHE + "".join(f"{name}: {value}\r\n" for name, value in cors.items() if value)


def prediction_response(answered: Prediction | Stream) -> HttpResponse:
    """The answer that carries a prediction, or the stream of its pieces.

    Raises:
        ServeError: The handler set a header, a phrase or a status that cannot be sent.
    """
    if isinstance(answered, Prediction):
        check_prediction(answered)
        return HttpResponse(answered.status, answered.body, answered.headers, answered.reason)
    first = answered.first
    try:
        check_prediction(first)
    except ServeError:
        answered.close()
        raise
    return HttpResponse(first.status, b"", first.headers, first.reason, answered)


def check_prediction(prediction: Prediction) -> None:
    """Make sure that HTTP can carry what a handler has set.

    Raises:
        ServeError: It cannot: a header, the phrase or the status.
    """
    if not 200 <= prediction.status <= 999:
        raise ServeError(f"The handler set the status {prediction.status}.")
    if prediction.reason and not _FIELD_VALUE.fullmatch(prediction.reason):
        raise ServeError("The handler set a reason phrase that HTTP cannot carry.")
    for name, value in prediction.headers.items():
        if not _FIELD_NAME.fullmatch(name) or not _FIELD_VALUE.fullmatch(value):
            raise ServeError(f"The handler set a header that HTTP cannot carry: {name!r}.")


def json_response(
    document: Any, status: int = 200, headers: Mapping[str, str] = _NO_MEMBERS
) -> HttpResponse:
    """A JSON document in the house style: two spaces, a newline at the end, no null members."""
    body = json_text(document).encode("utf-8", "replace")
    return HttpResponse(status, body, {**_JSON_HEADERS, **headers})


def text_response(text: str, content_type: str) -> HttpResponse:
    """A text document."""
    return HttpResponse(200, text.encode("utf-8", "replace"), {"content-type": content_type})


def error_response(error: ServeError, more: Mapping[str, str] = _NO_MEMBERS) -> HttpResponse:
    """The body clients of TorchServe know for a failure, and ``more`` members."""
    # What a handler said is passed on even if it is nothing.
    message = error.message if error.message or isinstance(error, PredictionFailed) else None
    document = {"code": error.status, "type": error.wire_type, "message": message, **more}
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, Overloaded) else {}
    return json_response(document, error.status, headers)


def json_text(document: Any) -> str:
    """The text of a JSON document in the house style."""
    return json.dumps(_without_nulls(document), indent=2, ensure_ascii=False) + "\n"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
