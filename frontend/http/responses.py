"""What goes out: predictions, JSON documents and errors as HTTP responses.

`Answer` writes status line, headers and body in one go instead of letting aiohttp build them: that
costs less, and TorchServe's clients see the headers they know: no ``content-type`` unless a handler
set one, an empty reason phrase on predictions, the caching headers on everything.
"""

import asyncio
import http
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11

from marserve.backend.protocol import Buffer, Prediction
from marserve.frontend.batching.streams import Stream, StreamBroken
from marserve.frontend.errors import Overloaded, PayloadTooLarge, PredictionFailed, ServeError

logger = logging.getLogger(__name__)

_NO_CACHE = (
    "Pragma: no-cache\r\n"
    "Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
    "Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
# The framing of a response is the server's, and a handler that sets it would break it; that nobody
# caches an answer is the server's word too.
_OURS = frozenset(
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
_NO_MEMBERS: Mapping[str, str] = {}


class Answer(web.StreamResponse):
    """A response whose body is known.

    Args:
        status: HTTP status.
        body: The body.
        headers: Besides those every answer has.
        reason: Phrase of the status line; None for the standard one.

    Attributes:
        prelude: Header lines that the door adds to all its answers.
        request_id: Sent as ``x-request-id`` when not empty.
    """

    def __init__(
        self,
        status: int,
        body: Buffer = b"",
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(status=status, reason=reason)
        self.prelude = ""
        self.request_id = ""
        self._answer_headers = headers
        self._answer_body = body

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write the whole response; called by aiohttp."""
        self._keep_alive = request.keep_alive and self._status < 400
        transport = request.transport
        if transport is None:
            return None
        body = b"" if request.method == "HEAD" else self._answer_body
        write_response(transport, self._status, self._head(), body)
        await request.writer.drain()  # a client that sends without reading waits for itself
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write; called by aiohttp."""
        assert not data
        self._eof_sent = True

    def _head(self) -> bytes:
        return response_head(
            self._status,
            self._reason,
            self.request_id,
            self.prelude,
            self._answer_headers,
            self._framing(),
            keep_alive=bool(self._keep_alive),
        )

    def _framing(self) -> str:
        """The header that tells where the body ends."""
        return framing(self._status, len(self._answer_body))

    def write_to(self, transport: asyncio.WriteTransport, *, keep_alive: bool) -> None:
        """Write the whole response to a client that has not asked with HEAD."""
        self._keep_alive = keep_alive
        write_response(transport, self._status, self._head(), self._answer_body)


def response_head(
    status: int,
    reason: str,
    request_id: str,
    prelude: str,
    headers: Mapping[str, str] | None,
    framing: str,
    *,
    keep_alive: bool,
) -> bytes:
    """The head of a response.

    Args:
        status: HTTP status.
        reason: Phrase of the status line.
        request_id: Sent as ``x-request-id`` when not empty.
        prelude: Header lines of every answer.
        headers: The answer's own.
        framing: The header line that tells where the body ends.
        keep_alive: Whether the connection stays.
    """
    named = f"x-request-id: {request_id}\r\n" if request_id else ""
    own = _header_lines(headers) if headers else ""
    end = "keep-alive" if keep_alive else "close"
    head = f"HTTP/1.1 {status} {reason}\r\n{named}{prelude}{own}{framing}connection: {end}\r\n\r\n"
    try:
        return head.encode("latin-1")  # as clients read it
    except UnicodeEncodeError:  # it says more than Latin-1 can
        return head.encode("utf-8", "replace")


def framing(status: int, length: int) -> str:
    """The header line that tells where a body ends whose length is known."""
    return "" if status == _NO_CONTENT else f"content-length: {length}\r\n"


def write_response(
    transport: asyncio.WriteTransport, status: int, head: bytes, body: Buffer
) -> None:
    """Write a response whose body is known, in one piece where copying it costs less."""
    if not body or status in _WITHOUT_BODY:
        transport.write(head)  # a client would take a body for the next answer
    elif len(body) <= _JOINED_BYTES:
        transport.write(head + body)
    else:
        transport.writelines([head, body])


class StreamAnswer(Answer):
    """A response whose body comes in pieces.

    Args:
        stream: The pieces; closed when the last is written or the client has left.
    """

    def __init__(self, stream: Stream) -> None:
        first = stream.first
        super().__init__(first.status, b"", first.headers, first.reason)
        self._stream = stream
        self._chunked = True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write the whole response, piece by piece; called by aiohttp."""
        try:
            await self._write(request)
        except StreamBroken as error:
            # Without the last chunk, so that the client does not take it for complete.
            self._keep_alive = False
            _give_up(request, str(error))
        finally:
            self._stream.close()
        return None

    async def _write(self, request: web.BaseRequest) -> None:
        self._chunked = request.version >= HttpVersion11  # else the end of the connection is theirs
        self._keep_alive = request.keep_alive and self._status < 400 and self._chunked
        _write(request, self._head())
        has_body = request.method != "HEAD" and self._status not in _WITHOUT_BODY
        self._stream.on_behind = partial(_give_up, request)
        async for piece in self._stream.pieces():
            if piece and has_body:
                _write(request, *self._chunk(piece))
                await request.writer.drain()
        if self._chunked and has_body:
            _write(request, b"0\r\n\r\n")

    def _chunk(self, piece: Buffer) -> Sequence[Buffer]:
        return (b"%x\r\n" % len(piece), piece, b"\r\n") if self._chunked else (piece,)

    def _framing(self) -> str:
        if self._chunked and self._status not in _WITHOUT_BODY:
            return "transfer-encoding: chunked\r\n"
        return ""


def prelude(cors: Mapping[str, str | None]) -> str:
    """The header lines every answer of a listener carries.

    Args:
        cors: CORS header names to configured values; those without a value are left out.
    """
    return _NO_CACHE + "".join(f"{name}: {value}\r\n" for name, value in cors.items() if value)


def prediction_answer(answered: Prediction | Stream) -> Answer:
    """The answer that carries a prediction, or the stream of its pieces.

    Raises:
        ServeError: The handler set a header, a phrase or a status that cannot be sent.
    """
    if type(answered) is Stream:
        try:
            check_prediction(answered.first)
        except ServeError:
            answered.close()
            raise
        return StreamAnswer(answered)
    assert isinstance(answered, Prediction)
    check_prediction(answered)
    return Answer(answered.status, answered.body, answered.headers, answered.reason)


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


def json_answer(
    document: Any, status: int = 200, headers: Mapping[str, str] = _NO_MEMBERS
) -> Answer:
    """A JSON document in the house style: two spaces, a newline at the end, no null members."""
    body = json_text(document).encode("utf-8", "replace")
    return Answer(status, body, {**_JSON_HEADERS, **headers})


def text_answer(text: str, content_type: str) -> Answer:
    """A text document."""
    return Answer(200, text.encode("utf-8", "replace"), {"content-type": content_type})


def error_answer(error: ServeError, more: Mapping[str, str] = _NO_MEMBERS) -> Answer:
    """The body clients of TorchServe know for a failure, and ``more`` members."""
    # What a handler said is passed on even if it is nothing.
    message = error.message if error.message or isinstance(error, PredictionFailed) else None
    document = {"code": error.status, "type": error.wire_type, "message": message, **more}
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, Overloaded) else {}
    answer = json_answer(document, error.status, headers)
    if isinstance(error, PayloadTooLarge):
        answer.set_status(error.status, "Request Entity Too Large")  # Python has renamed it
    if error.status not in http.HTTPStatus._value2member_map_:
        answer.set_status(error.status, "")
    return answer


def json_text(document: Any) -> str:
    """The text of a JSON document in the house style."""
    return json.dumps(_without_nulls(document), indent=2, ensure_ascii=False) + "\n"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value


def _give_up(request: web.BaseRequest, why: str = "the client is too slow") -> None:
    if request.transport is not None:
        logger.warning("An answer was broken off: %s", why)
        request.transport.abort()


def _write(request: web.BaseRequest, *buffers: Buffer) -> None:
    if request.transport is not None:
        request.transport.writelines(buffers)


def _header_lines(headers: Mapping[str, str]) -> str:
    lines = [f"{k}: {v}\r\n" for k, v in headers.items() if k.lower() not in _OURS]
    return "".join(lines)
