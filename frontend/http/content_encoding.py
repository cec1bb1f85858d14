"""Decodes the Content-Encoding of a request: gzip, or deflate with and without zlib's header.

TorchServe passes encoded bodies on to the handler; the routes of other protocols decode them.
"""

import zlib
from collections.abc import Iterable

from marserve.frontend.aio.long_work import Steps
from marserve.frontend.errors import BadRequest, EncodingNotSupported, PayloadTooLarge

_GZIP = ("gzip", "x-gzip")
_DEFLATE = "deflate"
# Bytes that one step reads and writes at most: less than a millisecond.
_INPUT_BYTES = 1 << 14
_OUTPUT_BYTES = 1 << 17
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_ZLIB_METHOD = 8


def coding_of(values: Iterable[str]) -> str:
    """Return the coding that the values of Content-Encoding name; empty for none.

    Raises EncodingNotSupported for several codings, and for other ones.
    """
    written = ", ".join(values)
    named = [name for each in written.split(",") if (name := each.strip().lower())]
    codings = [name for name in named if name != "identity"]
    if not codings:
        return ""
    if len(codings) > 1 or codings[0] not in (*_GZIP, _DEFLATE):
        raise EncodingNotSupported(written)
    return codings[0]


def decoded(body: bytes | bytearray, coding: str, max_bytes: int) -> Steps[bytearray]:
    """Return a body decoded.

    Raises:
        PayloadTooLarge: It would be longer than ``max_bytes``.
        BadRequest: It is truncated or corrupt, or other bytes follow it.
    """
    whole = bytearray()
    view, at = memoryview(body), 0
    while at < len(view):  # gzip allows several members
        inflate = zlib.decompressobj(_window(coding, body))
        rest: bytes | memoryview = b""
        while not inflate.eof:
            if not rest:
                rest = view[at : at + _INPUT_BYTES]
                at += len(rest)
            is_last = not rest
            try:
                piece = inflate.decompress(rest, _OUTPUT_BYTES)
            except zlib.error as error:
                raise _undecodable(coding, str(error).rpartition(": ")[2]) from None
            if is_last and not piece and not inflate.eof:
                raise _undecodable(coding, "it is truncated")
            rest = inflate.unconsumed_tail
            if len(whole) + len(piece) > max_bytes:
                raise PayloadTooLarge(max_bytes, "decoded request body")
            whole += piece
            yield len(piece)
        at -= len(inflate.unused_data)
        if coding == _DEFLATE and at < len(view):
            raise _undecodable(coding, "bytes follow its end")
    return whole


def _window(coding: str, body: bytes | bytearray) -> int:
    if coding != _DEFLATE:
        return _GZIP_WINDOW
    # RFC 1950. RFC 9110 wants this header; some clients leave it out.
    has_header = (
        len(body) >= 2
        and body[0] & 15 == _ZLIB_METHOD
        and body[0] >> 4 <= 7
        and (body[0] << 8 | body[1]) % 31 == 0
    )
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


def _undecodable(coding: str, why: str) -> BadRequest:
    return BadRequest(f"The Content-Encoding is {coding}, and the body cannot be decoded: {why}.")
