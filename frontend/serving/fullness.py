"""The decision that a model version is full, so that balancers send new requests elsewhere.

A balancer checks only periodically, so a version is full from a share of 0.9 of a limit on, and
stays full until all shares are below 0.6: balancers that remove and add a replica at every check
would move all their requests each time.
"""

from typing import NamedTuple

_FULL_FROM = 0.9
_UNTIL_BELOW = 0.6


class Use(NamedTuple):
    """The used share of a limit; ``sentence`` is the reason if it is too high."""

    share: float
    sentence: str


class Fullness:
    """The state of one model version, with hysteresis."""

    def __init__(self) -> None:
        self._was_full = False

    def reason(self, *uses: Use) -> str:
        """Return why it is full now; empty if it is not."""
        most = max(uses)
        self._was_full = most.share >= (_UNTIL_BELOW if self._was_full else _FULL_FROM)
        return most.sentence if self._was_full else ""
