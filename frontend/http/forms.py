"""Parsers of forms: application/x-www-form-urlencoded and multipart/form-data.

Both are `Steps`, because a form of a few megabytes can take seconds to parse. The number of parts,
and the bytes of the head of each part, are limited.

aiohttp's reader takes 0.2 ms for each part and cannot be interrupted. python-multipart 0.0.34 is as
fast as this file, but refuses a preamble and blanks behind a boundary (RFC 2046, section 5.1.1),
and leaves the heads of parts and their encodings to its user.
"""

import binascii
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import unquote, unquote_to_bytes

from marserve.backend.protocol import Buffer, Part
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.errors import BadRequest

Body = bytes | bytearray

_OCTETS = "application/octet-stream"
_MIXED = "multipart/mixed"
# Bytes that one step searches or copies, and bytes that it decodes.
_SEARCHED_BYTES = 1 << 20
_DECODED_BYTES = 1 << 14
# Bytes of memory of a part beside its value.
_PART_BYTES = 400
_MAX_BOUNDARY = 70  # RFC 2046
_BOUNDARY = re.compile(r';\s*boundary\s*=\s*(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
# Possessive, so that a failed match does not try shorter runs of blanks. The last alternative is
# for clients that do not escape a quote or a backslash, or write blanks without quotes.
_PARAMETER = re.compile(
    r""";\s*+([\w!#$%&'*+.^`|~-]++)\s*+=\s*+"""
    r"""(?:(?:"((?:[^"\\]|\\.)*+)"|([^\s;"]*+))(?=\s*+(?:;|$))|([^;]*+))"""
)
_QUOTED_PAIR = re.compile(r"\\(.)")
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_NOT_BASE64 = bytes(set(range(256)) - set(_BASE64))


@dataclass(frozen=True)
class FormLimits:
    """The limits of a form."""

    max_parts: int = 1000  # or fields
    max_head_bytes: int = 8192  # of a part, or of the name of a field


# -- application/x-www-form-urlencoded -------------------------------------------------------------


def urlencoded_parts(body: Body, limits: FormLimits) -> Steps[list[Part]]:
    """Return the fields of a form, or raise BadRequest.

    A repeated field has its last value, at the position of the first. A last token without ``=`` is
    dropped, and a line break at the end.
    """
    fields = {}
    at = 0
    size = len(body)
    if body.endswith(b"\n"):  # of the file that was sent; TorchServe ends the form there
        size -= 2 if body.endswith(b"\r\n") else 1
    for _ in range(limits.max_parts):
        end = body.find(b"&", at)
        stop = size if end < 0 else end
        equals = body.find(b"=", at, stop)
        name_end = stop if equals < 0 else equals
        if name_end - at > limits.max_head_bytes:
            raise BadRequest(f"A form field has a name of more than {limits.max_head_bytes} bytes.")
        if name_end > at and (end >= 0 or equals >= 0):
            name = _unquoted(body[at:name_end]).decode("utf-8", "replace")
            value = yield from _decoded(body, min(name_end + 1, stop), stop, b"%", _unquoted)
            fields[name] = Part(name, "", value)
        if end < 0:
            return list(fields.values())
        at = end + 1
        yield _PART_BYTES
    raise BadRequest(f"The form has more than {limits.max_parts} fields.")


def query_parts(tokens: Iterable[bytes]) -> list[Part]:
    """Return the parameters of a query, as those of a form."""
    fields = {}
    for token in tokens:
        name, _, value = token.partition(b"=")
        if name:
            key = _unquoted(name).decode("utf-8", "replace")
            fields[key] = Part(key, "", _unquoted(value))
    return list(fields.values())


def query_value(tokens: Iterable[bytes], wanted: str) -> str:
    """Return the first value of a query parameter, or an empty string; or raise BadRequest."""
    for token in tokens:
        name, _, value = token.partition(b"=")
        if _unquoted(name) == wanted.encode():
            return _unquoted(value).decode("utf-8", "replace")
    return ""


def _unquoted(text: Body) -> bytes:
    if _BROKEN_ESCAPE.search(text):  # unquote_to_bytes accepts it
        raise BadRequest("A form field or a query parameter has a malformed percent-escape.")
    return unquote_to_bytes(bytes(text).replace(b"+", b" "))


def _decoded(
    body: Body, start: int, end: int, escape: bytes, decode: Callable[[Body], bytes]
) -> Steps[bytes]:
    """Decode a slice of a body whose escapes are three bytes long, in pieces between escapes."""
    pieces = []
    while start < end:
        stop = min(start + _DECODED_BYTES, end)
        if stop < end and (begun := body.find(escape, stop - 2, stop)) >= 0:
            stop = begun
        pieces.append(decode(body[start:stop]))
        start = stop
        yield len(pieces[-1])
    return b"".join(pieces)


# -- multipart/form-data ---------------------------------------------------------------------------


def boundary_of(content_type: str) -> str:
    """Return the boundary that a content type names, or an empty string."""
    found = _BOUNDARY.search(content_type)
    return (found[1] or found[2]) if found else ""


def multipart_parts(body: Body, boundary: str, limits: FormLimits) -> Steps[list[Part]]:
    """Return the parts of a form, or raise BadRequest; only files have a media type.

    A part of the type multipart/mixed is replaced by its own parts, which have its name (RFC 2388,
    section 4.2), or that which one of them or of those before it has.
    """
    parts: list[Part] = []
    yield from _add_parts(_Multipart(body, 0, len(body), boundary), limits, parts)
    return parts


@dataclass(frozen=True)
class _Multipart:
    """A slice of a body that has parts, and what separates them."""

    body: Body
    start: int
    end: int
    boundary: str
    name: str | None = None  # of parts without one; None for the form itself


def _add_parts(form: _Multipart, limits: FormLimits, parts: list[Part]) -> Steps[None]:
    body, end, name = form.body, form.end, form.name
    if len(form.boundary) > _MAX_BOUNDARY:
        raise _malformed(f"the boundary is longer than {_MAX_BOUNDARY} characters")
    dashes = b"--" + form.boundary.encode("utf-8", "surrogateescape")
    # Written by hand, it may have no carriage returns. TorchServe takes it, too.
    line_end = b"\n" if body.startswith(dashes + b"\n", form.start) else b"\r\n"
    delimiter = line_end + dashes
    # The first delimiter needs no line break at the beginning of the body.
    is_first = body.startswith(dashes, form.start)
    at = form.start - len(line_end) if is_first else (yield from _find(form, delimiter, form.start))
    while True:
        head = _end_of_line(form, at + len(delimiter), line_end)
        if head is None:
            return
        if len(parts) == limits.max_parts:
            raise BadRequest(f"The multipart body has more than {limits.max_parts} parts.")
        last = min(end, head + limits.max_head_bytes + len(line_end))
        head_end = body.find(line_end * 2, head - len(line_end), last)
        if head_end < 0:
            raise _malformed(
                f"the head of a part does not end, or is longer than {limits.max_head_bytes} bytes"
            )
        # The line break at the end of the head may belong to the delimiter behind an empty part.
        at = yield from _find(form, delimiter, head_end + len(line_end))
        part = _read_head(body[head : max(head, head_end)], line_end, name)
        value_start = min(head_end + 2 * len(line_end), at)
        if part.boundary:
            if form.name is not None:
                raise _malformed("a part of a multipart/mixed part is multipart/mixed")
            inner = _Multipart(body, value_start, at, part.boundary, part.name)
            yield from _add_parts(inner, limits, parts)
        else:
            value = yield from _transferred(body, value_start, at, part.encoding)
            parts.append(Part(part.name, part.media_type, value))
            if form.name is not None:
                name = part.name
        yield _PART_BYTES


def _malformed(why: str) -> BadRequest:
    return BadRequest(f"The multipart body is malformed: {why}.")


def _find(form: _Multipart, delimiter: bytes, start: int) -> Steps[int]:
    while start < form.end:
        stop = start + _SEARCHED_BYTES
        found = form.body.find(delimiter, start, min(form.end, stop + len(delimiter)))
        if found >= 0:
            return found
        start = stop
        yield 0
    raise _malformed("the last boundary is missing")


def _end_of_line(form: _Multipart, at: int, line_end: bytes) -> int | None:
    """Return where the line behind a delimiter begins; None behind the last delimiter.

    The last one may lack its dashes, at the end of the body: nothing is lost, as in TorchServe.
    """
    if at == form.end or form.body.startswith(b"--", at):
        return None
    end = form.body.find(line_end, at, min(form.end, at + _MAX_BOUNDARY))
    if end < 0 or form.body[at:end].strip():  # RFC 2046 allows blanks
        raise _malformed("a boundary is followed by other text")
    return end + len(line_end)


@dataclass(frozen=True, slots=True)
class _PartHead:
    name: str
    media_type: str  # empty for no file
    encoding: str  # Content-Transfer-Encoding
    boundary: str  # of its parts, if it is multipart/mixed


def _read_head(head: Body, line_end: bytes, default_name: str | None) -> _PartHead:
    """Return the head of a part; BadRequest if it is malformed, or has no name."""
    headers = {}
    for line in head.decode("utf-8", "surrogateescape").split(line_end.decode()):
        header, colon, text = line.partition(":")
        if line and not colon:
            raise _malformed("a header of a part has no colon")
        headers[header.strip().lower()] = text.strip()
    disposition = headers.get("content-disposition", "")
    parameters = {
        key.lower(): _QUOTED_PAIR.sub(r"\1", quoted) or plain or other.strip().strip('"')
        for key, quoted, plain, other in _PARAMETER.findall(disposition)
    }
    name = parameters.get("name")
    # RFC 7578 forbids name* beside name: a filter that reads only name must see the same field.
    if name is None and "name*" in parameters:  # RFC 5987: charset'language'text
        charset, _, text = parameters["name*"].partition("'")
        name = _unquoted_name(charset, text.partition("'")[2])
    name = default_name if name is None else name
    if name is None:
        raise BadRequest("The multipart body has a part without a name.")
    is_file = not parameters.keys().isdisjoint(("filename", "filename*"))
    content_type = headers.get("content-type", _OCTETS)
    media_type = content_type.partition(";")[0]
    is_mixed = media_type.strip().lower() == _MIXED
    return _PartHead(
        name,
        media_type if is_file else "",
        headers.get("content-transfer-encoding", "").lower(),
        boundary_of(content_type) if is_mixed else "",
    )


def _unquoted_name(charset: str, text: str) -> str:
    try:
        return unquote(text, charset or "utf-8", "replace")
    except (LookupError, ValueError) as error:  # unknown charset, or one without "replace"
        raise _malformed(str(error)) from error


def _transferred(body: Body, start: int, end: int, encoding: str) -> Steps[Buffer]:
    if encoding == "base64":
        return (yield from _from_base64(body, start, end))
    if encoding == "quoted-printable":
        return (yield from _decoded(body, start, end, b"=", binascii.a2b_qp))
    if encoding not in ("", "7bit", "8bit", "binary"):
        raise _malformed(f"unknown content transfer encoding: {encoding[:80]}")
    return memoryview(body)[start:end]


def _from_base64(body: Body, start: int, end: int) -> Steps[bytes]:
    pieces, rest = [], b""
    for at in range(start, end, _SEARCHED_BYTES):
        rest += body[at : min(at + _SEARCHED_BYTES, end)].translate(None, _NOT_BASE64)
        whole = len(rest) // 4 * 4
        pieces.append(_base64(rest[:whole]))
        rest = rest[whole:]
        yield len(pieces[-1])
    pieces.append(_base64(rest))
    return b"".join(pieces)


def _base64(text: bytes) -> bytes:
    try:
        return binascii.a2b_base64(text)
    except binascii.Error as error:
        raise _malformed(str(error)) from error
