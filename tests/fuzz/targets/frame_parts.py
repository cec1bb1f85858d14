"""Frames whose lengths are right, around any JSON and any bodies; garbage seldom gets that far.

The first byte of an input is the kind of message, its first line the JSON, the rest the bodies.
"""

import struct

from fuzz.targets import frames

from marserve.backend.framing import VERSION

LIMITS = frames.LIMITS


def target(data: bytes) -> None:
    """As for any frame."""
    text, _, bodies = data[1:].partition(b"\n")
    kind = data[0] % 5 if data else 0
    rest = struct.pack("!BBII", VERSION, kind, 0, len(text)) + text + bodies
    frames.target(struct.pack("!I", len(rest)) + rest)
