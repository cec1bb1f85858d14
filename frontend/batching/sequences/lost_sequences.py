"""The sequences whose state was lost, so that a client that returns receives an error."""

from marserve.frontend.batching.deadlines import Clock

# How many are remembered, in addition to those that may be open.
_MAX_REMEMBERED = 1000


class LostSequences:
    """The lost sequences of one model version.

    Each is remembered for as long as it would have been kept without a request. So a client that
    never marks a start can use its id again after a while.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: By id: the moment until which it is remembered, and the reason; the oldest first.
        self._lost: dict[str, tuple[float, str]] = {}

    def add(self, sequence_id: str, reason: str, seconds: float, max_open: int) -> None:
        """Remember a sequence for these seconds, beside the ``max_open`` that may be open."""
        now = self._clock()
        self._lost.pop(sequence_id, None)  # to the end of the order
        self._lost[sequence_id] = now + seconds, reason
        limit = max_open + _MAX_REMEMBERED
        while len(self._lost) > limit or next(iter(self._lost.values()))[0] <= now:
            del self._lost[next(iter(self._lost))]

    def reason(self, sequence_id: str) -> str:
        """Return why a sequence was lost; empty if it was not, or is no longer remembered."""
        until, reason = self._lost.get(sequence_id, (0.0, ""))
        return reason if self._clock() < until else ""

    def forget(self, sequence_id: str) -> None:
        """Remove a sequence that is started again."""
        self._lost.pop(sequence_id, None)
