"""What clients send to a listener: the answers are the same with the fast path and without it."""

import random
import zlib
from collections.abc import Iterator

from echo_routes import ROUTES
from fuzz.http_door import Exchange, exchange
from fuzz.limits import Limits

# Each input is sent in several ways, to two listeners.
LIMITS = Limits(
    calls=50_000, calls_per_byte=1_000, seconds=2.0, seconds_per_byte=4e-3, memory=16 << 20
)
_MAX_SINGLE_BYTES = 200
PLAIN = b"POST /model HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"


def target(data: bytes) -> None:
    """However the bytes are cut, both ways answer the same, at the same time."""
    for pieces in _ways(data):
        fast = exchange([*pieces, PLAIN], ROUTES)
        ordinary = exchange([*pieces, PLAIN], ROUTES, fast_path=False)
        assert fast.received == ordinary.received, pieces
        assert fast.requests == ordinary.requests, pieces
        assert abs(fast.seconds - ordinary.seconds) < 2, pieces
        _check_framing(fast)


def _ways(data: bytes) -> Iterator[list[bytes]]:
    """The bytes at once, one by one, and cut at places that only depend on them."""
    yield [data]
    if len(data) <= _MAX_SINGLE_BYTES:
        yield [data[at : at + 1] for at in range(len(data))]
    choice = random.Random(zlib.crc32(data))
    ends = sorted(choice.randrange(len(data) + 1) for _ in range(choice.randrange(1, 6)))
    yield [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


def _check_framing(answers: Exchange) -> None:
    """There is an answer, of as many bytes as it says, for each request that was logged."""
    rest = answers.received
    for method, _, status in answers.requests:
        while rest.startswith(b"HTTP/1.1 100 "):
            rest = rest.partition(b"\r\n\r\n")[2]
        head, _, rest = rest.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if method != "HEAD":
            assert len(rest) >= length
            rest = rest[length:]
    assert rest in (b"", b"HTTP/1.1 100 Continue\r\n\r\n")
