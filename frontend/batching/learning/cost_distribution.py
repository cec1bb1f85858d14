"""The distribution of costs: how much batches depart from what they are expected to take.

It is one for all sizes, of the ratio of real to expected seconds; the expected seconds are by size.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque

# The ratios of this many batches are kept: enough to see tails of a few percent, and few enough
# that those of an hour ago do not count.
_KEPT = 256
# What is assumed before anything was seen: deviations of an eighth. Each batch replaces one.
_ASSUMED = (
    *(0.79, 0.85, 0.88, 0.91, 0.93, 0.95, 0.97, 0.99),
    *(1.01, 1.03, 1.05, 1.07, 1.1, 1.13, 1.18, 1.26),
)
# So many batches at either end may be chance: a pause, a clock that stood still.
_EXTREMES = 2


class CostDistribution:
    """The ratios of real to expected seconds of the latest batches."""

    def __init__(self) -> None:
        self._latest = deque(_ASSUMED)
        self._sorted = list(_ASSUMED)
        self._assumed = len(_ASSUMED)

    def observe(self, ratio: float) -> None:
        """Learn from a batch."""
        if self._assumed or len(self._latest) == _KEPT:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
            self._assumed = max(0, self._assumed - 1)
        self._latest.append(ratio)
        insort(self._sorted, ratio)

    def chance(self, ratio: float) -> float:
        """The share of batches with at most this ratio."""
        return bisect_right(self._sorted, ratio) / len(self._sorted)

    def quantile(self, share: float) -> float:
        """The ratio that this share of batches does not exceed; not one of the most extreme."""
        place = int(share * len(self._sorted))
        return self._sorted[min(max(_EXTREMES, place), len(self._sorted) - 1 - _EXTREMES)]
