"""The distribution of costs: the ratio of real to expected seconds of batches, for all sizes."""

from bisect import bisect_left, insort
from collections import deque

# The number of batches whose ratios are kept: enough for tails of a few percent, and few enough
# that those of an hour ago do not count.
_KEPT = 256
# Assumed before any batch: deviations of an eighth. Each batch replaces one of them.
_ASSUMED = (
    0.79,
    0.85,
    0.88,
    0.91,
    0.93,
    0.95,
    0.97,
    0.99,
    1.01,
    1.03,
    1.05,
    1.07,
    1.1,
    1.13,
    1.18,
    1.26,
)
# The number of batches at either end that may be chance: a pause, a clock that stood still.
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

    def quantile(self, share: float) -> float:
        """Return the ratio that this share of batches does not exceed, without the extremes."""
        index = int(share * len(self._sorted))
        return self._sorted[min(max(_EXTREMES, index), len(self._sorted) - 1 - _EXTREMES)]
