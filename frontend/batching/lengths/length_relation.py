"""The relation between the length of an input as the server sees it and as the handler reports it.

It is learnt as a curve that never falls, from the pairs that workers report: the means of both in
buckets of about the same number of bytes, with straight lines between them. It is used while it
explains most of the variance of the handler's lengths; where the number of bytes does not predict
the length (a number in a small JSON, compressed pictures), batches are formed by bytes.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

# Buckets for each doubling of the bytes.
_BUCKETS = 2
_STEP = 0.05
_MIN_PAIRS = 20
# After the first pairs, the curve is calculated again after this number of pairs.
_PAIRS_DRAWN = 4
# It is used from this share of the variance on, and until it explains the second one.
_EXPLAINS = 0.5
_EXPLAINS_STILL = 0.25


@dataclass(slots=True)
class _Bucket:
    """Inputs of about one length: the mean of it, and the mean of what the handler reports."""

    seen: float = 0.0
    reported: float = 0.0
    count: int = 0

    def learn(self, seen: float, reported: float) -> None:
        self.count += 1
        step = max(_STEP, 1 / self.count)
        self.seen += step * (seen - self.seen)
        self.reported += step * (reported - self.reported)


class LengthRelation:
    """Estimates the length that the handler would report."""

    def __init__(self) -> None:
        self.pairs = 0
        self.failures = 0  # inputs that the handler could not measure
        self.is_used = False
        self.explained = 0.0  # the share of the variance of lengths
        self._buckets: dict[int, _Bucket] = {}
        #: Points of the curve, rising.
        self._seen: list[float] = []
        self._reported: list[float] = []
        self._mean = self._variance = self._error = 0.0

    def learn(self, seen: float, reported: float) -> bool:
        """Learn from a pair; return whether `is_used` has changed."""
        if self.pairs:
            step = max(_STEP / 2, 1 / self.pairs)
            self._variance += step * ((reported - self._mean) ** 2 - self._variance)
            self._error += step * ((reported - self._estimate(seen)) ** 2 - self._error)
        self.pairs += 1
        self._mean += max(_STEP / 2, 1 / self.pairs) * (reported - self._mean)
        key = math.floor(_BUCKETS * math.log2(max(1.0, seen)))
        self._buckets.setdefault(key, _Bucket()).learn(seen, reported)
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
        """Why the handler's lengths are used, or not, in a sentence."""
        if not self.pairs:
            return "input_length has failed so far; the model's log has its errors"
        if self.pairs < _MIN_PAIRS:
            return "learning"
        return f"the size of requests explains {self.explained:.0%} of what input_length returns"

    def length(self, seen: float) -> float:
        """Return the length of an input: as the handler would report it, or as it is seen."""
        return self._estimate(seen) if self.is_used else seen

    def _draw(self) -> None:
        """Calculate the curve; where it would fall, adjacent buckets get their common mean."""
        buckets = [self._buckets[key] for key in sorted(self._buckets)]
        pools: list[tuple[float, int, int]] = []  # mean, pairs, buckets
        for bucket in buckets:
            mean, pairs, width = bucket.reported, bucket.count, 1
            while pools and pools[-1][0] >= mean:
                below, others, more = pools.pop()
                mean = (mean * pairs + below * others) / (pairs + others)
                pairs, width = pairs + others, width + more
            pools.append((mean, pairs, width))
        self._seen = [bucket.seen for bucket in buckets]
        self._reported = [mean for mean, _, width in pools for _ in range(width)]

    def _estimate(self, seen: float) -> float:
        """Return the curve's value; below it in proportion, beyond it along its last piece."""
        xs, ys = self._seen, self._reported
        index = bisect_left(xs, seen)
        if not index or len(xs) == 1:
            return ys[0] * seen / xs[0] if xs[0] >= 1 else ys[0]  # no proportion to empty inputs
        left = min(index, len(xs) - 1) - 1
        slope = (ys[left + 1] - ys[left]) / (xs[left + 1] - xs[left])
        return ys[left] + slope * (seen - xs[left])
