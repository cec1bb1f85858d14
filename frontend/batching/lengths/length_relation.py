"""What the server sees of an input (its bytes) and what the handler says its length is.

The relation is learnt as a curve that never falls, from the pairs that workers report: the mean of
both in buckets of about the same number of bytes, with straight lines between them. It is used
while it explains most of what lengths differ by; where bytes say little about the length (a number
in a small JSON, pictures of any compression), they stay what batches are formed by.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

# Buckets for each doubling of the bytes.
_BUCKETS = 2
_STEP = 0.05
_MIN_PAIRS = 20
# Later the curve is drawn again after so many.
_PAIRS_DRAWN = 4
# It is used from this share of the variance on, and until it explains this one.
_EXPLAINS = 0.5
_EXPLAINS_STILL = 0.25


@dataclass(slots=True)
class _Bucket:
    """Means of inputs of about one number of bytes."""

    seen: float = 0.0
    said: float = 0.0
    count: int = 0

    def learn(self, seen: float, said: float) -> None:
        self.count += 1
        step = max(_STEP, 1 / self.count)
        self.seen += step * (seen - self.seen)
        self.said += step * (said - self.said)


class LengthRelation:
    """Estimates what the handler would say.

    Attributes:
        pairs: How many were learnt from.
        failures: How often the handler could not tell.
        is_used: Whether it explains enough.
        explained: How much of the variance of lengths, 0 to 1.
    """

    def __init__(self) -> None:
        self.pairs = self.failures = 0
        self.is_used = False
        self.explained = 0.0
        self._buckets: dict[int, _Bucket] = {}
        #: Points of the curve, rising.
        self._seen: list[float] = []
        self._said: list[float] = []
        self._mean = self._variance = self._error = 0.0

    def learn(self, seen: float, said: float) -> bool:
        """Learn from a pair; returns whether the relation is used from now on, or no more."""
        if self.pairs:
            step = max(_STEP / 2, 1 / self.pairs)
            self._variance += step * ((said - self._mean) ** 2 - self._variance)
            self._error += step * ((said - self._estimate(seen)) ** 2 - self._error)
        self.pairs += 1
        self._mean += max(_STEP / 2, 1 / self.pairs) * (said - self._mean)
        key = math.floor(_BUCKETS * math.log2(max(1.0, seen)))
        self._buckets.setdefault(key, _Bucket()).learn(seen, said)
        if self.pairs <= _MIN_PAIRS or not self.pairs % _PAIRS_DRAWN:
            self._draw()
        if self._variance > 0:
            self.explained = max(0.0, 1 - self._error / self._variance)
        enough = _EXPLAINS_STILL if self.is_used else _EXPLAINS
        was_used = self.is_used
        self.is_used = self.pairs >= _MIN_PAIRS and self.explained >= enough
        return self.is_used is not was_used

    @property
    def why(self) -> str:
        """Why what the handler says is used, or not, in a sentence."""
        if self.pairs < _MIN_PAIRS:
            return "learning" if self.pairs else "it has failed so far: see the model's log"
        return f"the size of requests explains {self.explained:.0%} of what input_length says"

    def length(self, seen: float) -> float:
        """The length of an input: as the handler would say it, or as it is seen."""
        return self._estimate(seen) if self.is_used else seen

    def _draw(self) -> None:
        """Draw the curve: where it would fall, neighbours get the mean of them all."""
        buckets = [self._buckets[key] for key in sorted(self._buckets)]
        pools: list[tuple[float, int, int]] = []  # mean, pairs, buckets
        for bucket in buckets:
            mean, pairs, width = bucket.said, bucket.count, 1
            while pools and pools[-1][0] >= mean:
                below, others, more = pools.pop()
                mean = (mean * pairs + below * others) / (pairs + others)
                pairs, width = pairs + others, width + more
            pools.append((mean, pairs, width))
        self._seen = [bucket.seen for bucket in buckets]
        self._said = [mean for mean, _, width in pools for _ in range(width)]

    def _estimate(self, seen: float) -> float:
        """On the curve; below it in proportion, beyond it along its last piece."""
        xs, ys = self._seen, self._said
        place = bisect_left(xs, seen)
        if not place or len(xs) == 1:
            return ys[0] * seen / xs[0] if xs[0] >= 1 else ys[0]  # of nothing there is no share
        left = min(place, len(xs) - 1) - 1
        slope = (ys[left + 1] - ys[left]) / (xs[left + 1] - xs[left])
        return ys[left] + slope * (seen - xs[left])
