"""Ids of requests: UUIDs of version 4, made in a quarter of the time `uuid.uuid4` takes.

They have to be unique, not secret, so they come from a generator seeded by the system once rather
than from a system call each.
"""

import random

_random_bits = random.Random(random.SystemRandom().getrandbits(256)).getrandbits  # noqa: S311 - no secret


# Which of the 128 bits are random, and what the others are: version 4 and the variant.
_RANDOM_BITS = 0xFFFFFFFF_FFFF_0FFF_3FFF_FFFFFFFFFFFF
_FIXED_BITS = 0x00000000_0000_4000_8000_000000000000


def new_request_id() -> str:
    """A fresh id, e.g. ``1f2ae5c0-8d52-4b63-9d0c-7f9f43d9f4b1`` (RFC 9562, section 5.4)."""
    bits = _random_bits(128) & _RANDOM_BITS | _FIXED_BITS
    digits = bits.to_bytes(16, "big").hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
