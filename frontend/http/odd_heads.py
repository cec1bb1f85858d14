"""Heads that aiohttp refuses and TorchServe took: repairs what is safe, and names what is not.

aiohttp refuses a request of HTTP/1.1 without Host, and some headers that are sent twice. Clients
send such requests: probes of balancers, and programs whose two layers both set a header. RFC 9112
wants a refusal where two programs could read one request in two ways, so only what cannot change
the length of a request or its receiver is repaired.
"""

import http
import re
from collections.abc import Callable

#: Bytes of a request line, or of a header, above which aiohttp refuses a request.
MAX_LINE_BYTES = 8190
#: A longer head is neither repaired nor read for the reason of a refusal.
MAX_HEAD_BYTES = 1 << 16
#: The end of a head.
END = b"\r\n\r\n"

_HOST = b"localhost"  # as the guard reads a request without Host
_CONTENT_TYPE = b"content-type"
# Repeated, the last one counts, as in TorchServe: none of them decides about a request.
_HARMLESS = (
    b"content-location",
    b"content-range",
    b"etag",
    b"max-forwards",
    b"server",
    b"user-agent",
)
_REPAIRED = (_CONTENT_TYPE, *_HARMLESS)
# Looking at the first letter first halves the time.
_LOOKED_FOR = re.compile(b"\\r\\n(?=[cehmsu])(host|" + b"|".join(_REPAIRED) + b"):", re.IGNORECASE)
_SINGLE = (*_REPAIRED, b"content-length", b"host", b"transfer-encoding")
_MAX_HEADERS = 128  # of aiohttp
_REQUEST_LINE = re.compile(rb"([A-Za-z-]{1,24}) +((?:/|\*|https?://)\S*)(?: +(HTTP/\d\.\d))?")
_PROBING = (b"GET", b"HEAD", b"OPTIONS")
# With one of them a request may be more than its head.
_FRAMING = frozenset((b"transfer-encoding", b"upgrade", b"expect", b"host"))
_UNKNOWN_METHOD = "Invalid method encountered"
_METHODS = frozenset(http.HTTPMethod)
_OTHER_PROTOCOLS = {
    b"\x16\x03": "it is the start of TLS, and the address is one of http",
    b"PROXY ": "the PROXY protocol is not supported",
}
# Messages of httptools.
_CLEARER = {
    "Content-Length can't be present with Transfer-Encoding": "both Content-Length and "
    "Transfer-Encoding are sent",
    "Data after `Connection: close`": "bytes follow the end of a request with Connection: close; a "
    "body needs Content-Length or Transfer-Encoding",
    "Duplicate Content-Length": "the header Content-Length is sent more than once",
    "Empty Content-Length": "the Content-Length is empty",
    "Expected CRLF after version": "the request line does not end with CRLF",
    "Expected HTTP/, RTSP/ or ICE/": "the request line does not end with a blank and HTTP/1.1",
    "Expected space after method": "no blank follows the method",
    "Expected LF after chunk data": "the data of a chunk does not end with CRLF",
    "Invalid `Transfer-Encoding` header value": "the only Transfer-Encoding is chunked, once",
    "Invalid char in url path": "the target has a character that has to be percent-encoded",
    "Invalid characters in url": "the target does not begin with a slash, or has a character that "
    "has to be percent-encoded",
    "Invalid character in Content-Length": "the Content-Length is not a number",
    "Invalid character in chunk size": "the size of a chunk is not a hexadecimal number",
    "Invalid header token": "a header has no colon, or a name with a character that is not allowed",
    "Invalid header value char": "the value of a header has a control character",
    "Invalid HTTP version": "only HTTP/1.1 and HTTP/1.0 are supported",
    _UNKNOWN_METHOD: "the method is unknown",
    "Missing expected CR after chunk size": "the size of a chunk does not end with CRLF",
    "Missing expected LF after header value": "a header has a carriage return in its value, "
    "or does not end with CRLF",
    "Pause on PRI/Upgrade": "HTTP/2 is not supported",
    "Request has invalid `Transfer-Encoding`": "the only Transfer-Encoding is chunked",
    "Unexpected whitespace after header value": "a header is folded over several lines",
}


def repaired(head: bytes, is_probe: Callable[[str, str], bool]) -> bytes:
    """Return a complete head as aiohttp reads it; unchanged if it is usual, or stays refused.

    * A header of `_HARMLESS` has its last value, Content-Type the one that is sent several times.
    * A GET, HEAD or OPTIONS without a body gets a Host if ``is_probe``, called with its method and
      target, returns true.
    """
    names = [name.lower() for name in _LOOKED_FOR.findall(head)]
    has_host = b"host" in names
    if has_host and len(set(names)) == len(names):  # the usual head: 1 us
        return head
    lines = head[: -len(END)].split(b"\r\n")
    for name in _REPAIRED:
        if names.count(name) > 1:
            lines = _with_one(lines, name)
    if not has_host and _is_bare(lines):
        method, target, version = _request_line(head)
        if version == "HTTP/1.1" and method.encode() in _PROBING and is_probe(method, target):
            lines.insert(1, b"Host: " + _HOST)
    return b"\r\n".join(lines) + END


def _with_one(lines: list[bytes], name: bytes) -> list[bytes]:
    """Return the lines with one of a header; all of them if its values decide and differ."""
    places = [place for place, line in enumerate(lines) if _name(line) == name and place]
    if name == _CONTENT_TYPE and len({_value(lines[place]) for place in places}) > 1:
        return lines
    return [line for place, line in enumerate(lines) if place not in places[:-1]]


def _is_bare(lines: list[bytes]) -> bool:
    """Return whether a request is its head only, and lacks a Host."""
    names = {_name(line): _value(line) for line in lines[1:]}
    return _FRAMING.isdisjoint(names) and names.get(b"content-length", b"0") == b"0"


def _name(line: bytes) -> bytes:
    return line.partition(b":")[0].lower()


def _value(line: bytes) -> bytes:
    return line.partition(b":")[2].strip(b" \t")


def _request_line(head: bytes) -> tuple[str, str, str]:
    """Return method, target and version of a head; empty where they cannot be read."""
    found = _REQUEST_LINE.fullmatch(head.lstrip(b"\r\n").partition(b"\n")[0].rstrip(b"\r"))
    if found is None:
        return "", "", ""
    method, target, version = (each or b"" for each in found.groups())
    text = target[:MAX_LINE_BYTES].decode("utf-8", "backslashreplace")
    return method.decode(), text, version.decode()


def described(head: bytes, error: str) -> tuple[str, str, str]:
    """Return method and target of a refused request, and why it is refused.

    Each of them is empty where it is unknown. ``error`` is that of `Heads`.
    """
    method, target, version = _request_line(head)
    if error == _UNKNOWN_METHOD:
        if method.upper() not in _METHODS:  # it may be the rest of another request
            method = target = ""
        for start, protocol in _OTHER_PROTOCOLS.items():
            if head.startswith(start):
                return "", "", protocol
    return method, target, _CLEARER.get(error, error) or _fault(head, version)


def _fault(head: bytes, version: str) -> str:
    """Return why aiohttp refuses a head that httptools reads."""
    lines = head.lstrip(b"\r\n").split(b"\r\n")
    if max(map(len, lines)) > MAX_LINE_BYTES:
        return f"the first line or a header is longer than {MAX_LINE_BYTES} bytes"
    if not head.endswith(END):
        return ""
    names = [_name(line) for line in lines[1:-2]]
    if len(names) > _MAX_HEADERS:
        return f"the request has more than {_MAX_HEADERS} headers"
    if version == "HTTP/1.1" and b"host" not in names:
        return "the request has no Host header"
    for name in _SINGLE:
        if names.count(name) > 1:
            return f"the header {name.title().decode()} is sent more than once"
    return ""
