"""Whether a model version is full, so that a balancer should send new requests elsewhere.

Each thing that admission checks has a limit; what is used of it is a share. A balancer asks only
now and then, and much comes in between: so a version calls itself full from 0.9 of a limit on. It
stays so until less than 0.6 is used: it would be full again within a moment, and balancers that
take a replica out and in at each look send all their requests to and fro.

A version with nothing to do is never full. So a balancer that sends it no requests sees it ready
again by and by, whatever the reason was.
"""

from typing import NamedTuple

_FULL_FROM = 0.9
_UNTIL_BELOW = 0.6


class Use(NamedTuple):
    """How much is used of something limited; ``sentence`` says what, where that is too much."""

    share: float
    sentence: str


class Fullness:
    """Whether one model version is full; remembers the last answer."""

    def __init__(self) -> None:
        self._was_full = False

    def reason(self, *uses: Use) -> str:
        """Why it is full now, for a person; empty while it is not."""
        most = max(uses)
        self._was_full = most.share >= (_UNTIL_BELOW if self._was_full else _FULL_FROM)
        return most.sentence if self._was_full else ""
