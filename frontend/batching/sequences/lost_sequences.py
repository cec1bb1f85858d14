"""Sequences whose state is lost: their clients are told so when they come back."""

from marserve.frontend.batching.deadlines import Clock

# How many are remembered, beyond those that may be open.
_MAX_REMEMBERED = 1000


class LostSequences:
    """Those of one model version, each for as long as it would have been kept without a request.

    After that it would have been forgotten all the same; and a client that never says "start" can
    go on some time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Until when, and what clients are told; in this order.
        self._lost: dict[str, tuple[float, str]] = {}

    def add(self, sequence_id: str, why: str, seconds: float, beside: int) -> None:
        """Remember one for these seconds; ``beside`` is how many sequences may be open."""
        now = self._clock()
        self._lost.pop(sequence_id, None)  # to the end of the order
        self._lost[sequence_id] = now + seconds, why
        most = beside + _MAX_REMEMBERED
        while len(self._lost) > most or next(iter(self._lost.values()))[0] <= now:
            del self._lost[next(iter(self._lost))]

    def why(self, sequence_id: str) -> str:
        """What the client of a sequence is told; empty if it is not lost."""
        until, why = self._lost.get(sequence_id, (0.0, ""))
        return why if self._clock() < until else ""

    def forget(self, sequence_id: str) -> None:
        """It is begun anew."""
        self._lost.pop(sequence_id, None)
