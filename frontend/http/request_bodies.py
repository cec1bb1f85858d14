"""Reads the body of an HTTP request into an `Input` of named parts.

    multipart/form-data                  a part for each field; a file keeps its media type
    application/x-www-form-urlencoded    a part for each field
    any other                            one part named ``body``, with the request's media type

Several fields may have the same name; `operations.predictions` selects what a handler gets.
"""

import asyncio
import math
from collections.abc import Mapping

from aiohttp import StreamReader, web
from aiohttp.http import HttpProcessingError

from marserve.backend.protocol import Buffer, Input, Part
from marserve.frontend.aio.long_work import joined
from marserve.frontend.errors import BadRequest, PayloadTooLarge
from marserve.frontend.http import content_encoding, forms
from marserve.frontend.http.requests import HttpRequest, PlainRequest

#: The answer to ``Expect: 100-continue``.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FORM = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"


async def read_input(
    request: HttpRequest,
    max_bytes: int,
    extra: Mapping[str, str],
    *,
    with_query: bool = False,
    decodes: bool = False,
) -> Input:
    """Read a request to its end, with all parts, also those of the same name, as `read_body`.

    The headers ``extra`` are added for the handler. ``with_query``, the parameters of the query are
    parts, before those of the body. ``decodes``, the body is decoded (`read_decoded`).
    """
    decodes = decodes and "content-encoding" in request.headers
    body = await (read_decoded if decodes else read_body)(request, max_bytes)
    removed, added = {b"expect"}, extra
    if decodes:
        removed.update((b"content-encoding", b"content-length"))
    if decodes or "content-length" not in request.headers:
        # A body that came in chunks has a length now, and no chunks.
        if request.headers.get("transfer-encoding", "").lower() == "chunked":
            removed.add(b"transfer-encoding")
        added = {"content-length": str(len(body)), **extra}
    headers = {
        name.decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape")
        for name, value in request.raw.raw_headers
        if name.lower() not in removed
    }
    headers.update(added)
    if request.trace is not None:
        headers = request.trace.applied_to(headers)
    parts = await _parts(request, body)
    if with_query:
        parts = [*forms.query_parts(_query_tokens(request)), *parts]
    return Input(request.id, headers, parts)


def plain_input(request: PlainRequest, body: Buffer, extra: Mapping[str, str]) -> Input:
    """Return the `Input` of a plain request and its body, without its query."""
    media_type = request.headers.get("content-type", "").partition(";")[0]
    headers = {**request.raw_headers, **extra}
    if request.trace is not None:
        headers = request.trace.applied_to(headers)
    return Input(request.id, headers, [Part("body", media_type, body)])


def is_form(content_type: str) -> bool:
    """Return whether a body of this type may have several parts."""
    return content_type.partition(";")[0].strip().lower() in (_FORM, _MULTIPART)


def query_value(request: HttpRequest, wanted: str) -> str:
    """Return the first value of a query parameter, or an empty string; or raise BadRequest."""
    return forms.query_value(_query_tokens(request), wanted)


def _query_tokens(request: HttpRequest) -> list[bytes]:
    return request.query.encode("utf-8", "surrogateescape").split(b"&")


async def read_body(request: HttpRequest, max_bytes: int) -> bytes | bytearray:
    """Read the body of a request.

    Raises:
        PayloadTooLarge: It is longer than ``max_bytes``.
        TooMuchInFlight: The clients of the listener use as much memory as they may.
        NeverFits: It alone takes more memory.
        BadRequest: It is incomplete, malformed, or too slow.
    """
    raw, limits, transport = request.raw, request.connection.limits, request.connection.transport
    if (raw.content_length or 0) > max_bytes:
        raise PayloadTooLarge(max_bytes)
    request.memory.check_alone(raw.content_length or 0)
    expects = request.headers.get("expect", "").lower() == "100-continue"
    if expects and not request.connection.has_continued and not transport.is_closing():
        transport.write(CONTINUE)
    chunks: list[bytes] = []
    size = 0
    end = asyncio.get_running_loop().time() + limits.body_timeout
    try:
        while chunk := await _next_chunk(raw.content, limits.body_timeout, end):
            size += len(chunk)
            end += len(chunk) / limits.body_rate if limits.body_rate else math.inf
            if size > max_bytes:
                raise PayloadTooLarge(max_bytes)
            request.memory.hold(len(chunk))
            chunks.append(chunk)
    except (HttpProcessingError, web.RequestPayloadError, ConnectionError, ValueError) as error:
        raise BadRequest("The request body ended early or is malformed.") from error
    return await request.memory.run(joined(chunks))


async def read_decoded(request: HttpRequest, max_bytes: int) -> bytes | bytearray:
    """Read the body of a request without its Content-Encoding, as `read_body`.

    ``max_bytes`` limits the body before and after it is decoded.

    Raises:
        EncodingNotSupported: The encoding is not gzip or deflate.
        BadRequest: The body cannot be decoded.
    """
    coding = content_encoding.coding_of(request.raw.headers.getall("content-encoding", ()))
    body = await read_body(request, max_bytes)
    if not coding:
        return body
    whole = await request.memory.run(content_encoding.decoded(body, coding, max_bytes))
    request.memory.release(len(body))
    return whole


async def _next_chunk(content: StreamReader, stall: float, end: float) -> bytes:
    """Return the next bytes; BadRequest after ``stall`` seconds or at the moment ``end``."""
    if content.is_eof():  # the usual case, without a timer: all of it has arrived
        return await content.readany()
    now = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(min(now + stall, end)):
            return await content.readany()
    except TimeoutError:
        raise late_body() from None


def late_body() -> BadRequest:
    """Return the error of a request whose body comes too slowly."""
    return BadRequest("The request body did not arrive in time.", status=408)


async def _parts(request: HttpRequest, body: bytes | bytearray) -> list[Part]:
    content_type = request.headers.get("content-type", "")
    written = content_type.partition(";")[0]
    media_type = written.strip().lower()
    limits, run = request.connection.limits.forms, request.memory.run
    if media_type == _FORM:
        parts = await run(forms.urlencoded_parts(body, limits))
        request.memory.release(len(body))  # its values are copies
        return parts
    if media_type == _MULTIPART and (boundary := forms.boundary_of(content_type)):
        return await run(forms.multipart_parts(body, boundary, limits))
    return [Part("body", written, body)]
