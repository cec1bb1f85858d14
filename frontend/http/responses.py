"""Responses: predictions, JSON documents and errors, and the bytes of their heads.

The headers are those of TorchServe: no ``content-type`` unless a handler sets one, an empty reason
phrase for predictions, caching headers on every response.
"""

import http
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marserve.backend.protocol import Buffer, Prediction
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.documents import json_steps, json_text
from marserve.frontend.errors import EncodingNotSupported, PredictionFailed, ServeError

STATUSES_WITHOUT_BODY = (204, 304)

_NO_CACHE = (
    "Pragma: no-cache\r\n"
    "Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
    "Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
# Headers that handlers cannot set: the framing of a response, and its caching.
_SERVER_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "transfer-encoding",
        "x-request-id",
        "pragma",
        "cache-control",
        "expires",
    }
)
_JSON_HEADERS = {"content-type": "application/json"}
# RFC 9110, section 5.6.2 (token) and 5.5 (field value; any text but control characters).
_FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FIELD_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]*")
# Python 3.13 has renamed that of 413.
_PHRASES = {status.value: status.phrase for status in http.HTTPStatus} | {
    413: "Request Entity Too Large"
}
_NO_MEMBERS: Mapping[str, str] = {}


@dataclass(slots=True)
class HttpResponse:
    """A response with a body, or with a stream, which is closed after it is written.

    ``content`` makes a body whose size others decide; the router runs it in slices.
    """

    status: int
    body: Buffer = b""
    headers: Mapping[str, str] | None = None  # beside those of all answers
    reason: str | None = None  # None: the standard phrase
    stream: Stream | None = None
    content: Steps[Buffer] | None = None


def common_headers(cors: Mapping[str, str | None]) -> str:
    """Return the header lines of every answer of a listener; empty CORS headers are left out."""
    return _NO_CACHE + "".join(f"{name}: {value}\r\n" for name, value in cors.items() if value)


def response_head(
    answer: HttpResponse | Prediction,
    request_id: str,
    common_headers: str,
    framing: str,
    *,
    keep_alive: bool,
) -> bytes:
    """Return the head of a response.

    ``framing`` is the header line that determines where the body ends; an empty ``request_id`` is
    left out.
    """
    status, reason = answer.status, answer.reason
    if reason is None:
        reason = _PHRASES.get(status, "")
    id_line = f"x-request-id: {request_id}\r\n" if request_id else ""
    own = _header_lines(answer.headers) if answer.headers else ""
    end = "keep-alive" if keep_alive else "close"
    head = (
        f"HTTP/1.1 {status} {reason}\r\n"
        f"{id_line}{common_headers}{own}{framing}connection: {end}\r\n\r\n"
    )
    try:
        return head.encode("latin-1")  # as clients read it
    except UnicodeEncodeError:
        return head.encode("utf-8", "replace")


def _header_lines(headers: Mapping[str, str]) -> str:
    lines = [f"{k}: {v}\r\n" for k, v in headers.items() if k.lower() not in _SERVER_HEADERS]
    return "".join(lines)


def prediction_response(prediction: Prediction | Stream) -> HttpResponse:
    """Return the response of a prediction, whole or streamed; raises as `check_prediction`."""
    if isinstance(prediction, Prediction):
        check_prediction(prediction)
        return HttpResponse(
            prediction.status, prediction.body, prediction.headers, prediction.reason
        )
    first = prediction.first
    try:
        check_prediction(first)
    except ServeError:
        prediction.close()
        raise
    return HttpResponse(first.status, b"", first.headers, first.reason, prediction)


def check_prediction(prediction: Prediction) -> None:
    """Raise ServeError if a handler set a header, a phrase or a status that is invalid in HTTP."""
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
    """Return a JSON response: indented by two spaces, a newline at the end, no null members."""
    return content_response(json_steps(document), {**_JSON_HEADERS, **headers}, status)


def content_response(
    content: Steps[Buffer], headers: Mapping[str, str] = _JSON_HEADERS, status: int = 200
) -> HttpResponse:
    """Return a response whose body is made in steps; ``headers`` has its media type."""
    return HttpResponse(status, headers=headers, content=content)


def text_response(text: str, content_type: str) -> HttpResponse:
    """Return a response with a text."""
    return HttpResponse(200, text.encode("utf-8", "replace"), {"content-type": content_type})


def error_response(error: ServeError, more: Mapping[str, object] = _NO_MEMBERS) -> HttpResponse:
    """Return the error response of TorchServe, with ``more`` members."""
    # The message of a handler is sent even if it is empty.
    message = error.message if error.message or isinstance(error, PredictionFailed) else None
    document = {"code": error.status, "type": error.wire_type, "message": message, **more}
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if isinstance(error, EncodingNotSupported):
        headers["accept-encoding"] = error.accepted
    return refusal_response(document, error.status, headers)


def refusal_response(
    document: Mapping[str, object], status: int, headers: Mapping[str, str]
) -> HttpResponse:
    """Return a JSON response with a short document."""
    body = json_text(document).encode("utf-8", "replace")
    return HttpResponse(status, body, {**_JSON_HEADERS, **headers})
