"""Several requests on a connection, each good, some special: each has its own answer, in order."""

from fuzz.choices import Choices
from fuzz.http_door import exchange
from fuzz.limits import Limits
from fuzz.targets.http import ROUTES

LIMITS = Limits(calls=60_000, calls_per_byte=2_000, seconds=1.0, memory=16 << 20)
_LINES = (
    b"Connection: keep-alive",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    b"Connection: Upgrade\r\nUpgrade: websocket",
    b"Upgrade: h2c",
    b"Expect: 100-continue",
    b"Connection: close",
    b"TE: trailers",
    b"X-A: 1\r\nx-a: 2",
    b"Content-Type: application/octet-stream",
)

_GARBAGE = "/bad-request"
_BEHIND = b"bytes follow the end of a request"


def target(data: bytes) -> None:
    """What is answered is the first so many requests, and all of them unless one is special."""
    choices = Choices(data)
    requests = [_request(choices, number) for number in range(2 + choices.number(5))]
    sent = b"".join(requests)
    ends = sorted(choices.number(len(sent)) for _ in range(choices.number(5)))
    pieces = [sent[start:end] for start, end in zip([0, *ends], [*ends, len(sent)], strict=True)]
    for fast_path in (True, False):
        answers = exchange(pieces, ROUTES, fast_path=fast_path)
        paths = [path for _, path, _ in answers.requests]
        # What is behind the last request is refused, by its path if that was read.
        is_refused = paths[-1] == _GARBAGE or _BEHIND in answers.received
        if b"close" in sent and is_refused:
            paths.pop()
        assert paths == [f"/model/{number}" for number in range(len(paths))]
        if not any(word in sent for word in (b"close", b"pgrade")):
            assert len(paths) == len(requests)
        _check_own(answers.received, len(paths))


def _check_own(received: bytes, count: int) -> None:
    """The answers carry what their own requests did, in order."""
    at = 0
    for number in range(count):
        at = received.find(b'"body-%d;' % number, at)
        assert at >= 0, number


def _request(choices: Choices, number: int) -> bytes:
    method = choices.one_of((b"POST", b"PUT", b"GET", b"OPTIONS"))
    lines = [b"%b /model/%d HTTP/1.1" % (method, number), b"Host: h"]
    if choices.number(3) == 0:
        lines.append(choices.one_of(_LINES))
    body = b"body-%d;" % number + b"x" * choices.number(20)
    if choices.number(4) == 0:
        cut = choices.number(len(body))
        body = _chunk(body[:cut]) + _chunk(body[cut:]) + b"0\r\n\r\n"
        lines.append(b"Transfer-Encoding: chunked")
    else:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", b""]) + body


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
