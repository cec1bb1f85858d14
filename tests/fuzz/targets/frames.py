"""Frames between the frontend and workers (`marserve.backend.framing`), as a peer may send them."""

from typing import Any

from fed_decoder import Decoder
from fuzz.limits import Limits

from marserve.backend.framing import encode
from marserve.backend.protocol import Message, ProtocolError

LIMITS = Limits(calls=2_000, calls_per_byte=20)
LIMIT = 1 << 20


def target(data: bytes) -> None:
    """At once, byte by byte and in pieces are the same: messages, or a `ProtocolError`."""
    at_once = _decoded(data, len(data) or 1)
    for size in (1, 7):
        assert _same(_decoded(data, size), at_once)
    messages, _ = at_once
    for message in messages:
        assert _same(Decoder(1 << 24).feed(b"".join(map(bytes, encode(message)))), [message])


def _decoded(data: bytes, size: int) -> tuple[list[Message], bool]:
    """What is decoded of pieces of a size, and whether it ends in a refusal."""
    decoder, messages = Decoder(LIMIT), list[Message]()
    try:
        for at in range(0, len(data), size):
            messages += decoder.feed(data[at : at + size])
    except ProtocolError:
        return [], True
    assert len(decoder.buffer) > 0
    return messages, False


def _same(some: Any, others: Any) -> bool:
    """Equal, where not a number equals itself."""
    return some == others or repr(some) == repr(others)
