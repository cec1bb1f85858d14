"""Buckets: the cost of batches of about one size, and the line through the costs of all sizes."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

# How much of the exponentially weighted mean size is the newest sample.
_STEP = 0.15
#: A bucket uses the median of its first samples, while caches fill and code is compiled.
FIRST_SAMPLES = 5
#: The number of samples from which on a slow one does not count: of two the faster one is used, of
#: more the median.
BELIEVED_SAMPLES = 2
# The most batches by which a bucket is weighted in the line.
_MAX_LINE_WEIGHT = 50


class Point(NamedTuple):
    """The present state of a bucket: mean size, mean seconds, number of batches."""

    size: float
    seconds: float
    batches: int


@dataclass(slots=True, eq=False)
class Bucket:
    """Batches of about one size; seconds are without the common factor of the latency model.

    Attributes:
        size: Their mean size.
        seconds: Their mean cost.
        median: The median of the first costs.
        is_profiled: Whether the cost was measured without traffic.
    """

    size: float
    seconds: float = 0.0
    median: float = 0.0
    count: int = 0
    is_profiled: bool = False
    _first: list[tuple[float, float]] = field(default_factory=list)

    @property
    def observed(self) -> float:
        """Seconds without the limit on those of rarely seen sizes."""
        return self.median if self.count < BELIEVED_SAMPLES else self.seconds

    @property
    def weight(self) -> int:
        """The number of samples in the mean; a median of five is as good as a mean of three."""
        return max(1, self.count - FIRST_SAMPLES + 3)

    def learn_first(self, size: float, seconds: float) -> None:
        """Learn from one of the first samples."""
        self.count += 1
        self._first.append((size, seconds))
        self.size = statistics.fmean(size for size, _ in self._first)
        costs = [seconds for _, seconds in self._first]
        self.seconds = self.median = statistics.median_low(costs)

    def restart(self, size: float, seconds: float) -> None:
        """Forget all samples, and learn from one."""
        self.count, self.is_profiled = 0, False
        self._first.clear()
        self.learn_first(size, seconds)

    def move(self, size: int, expected: float) -> None:
        """Move the mean size towards that of a sample, and the cost towards its expected cost."""
        self.size += _STEP * (size - self.size)
        self.seconds += _STEP * (expected - self.seconds)


@lru_cache(maxsize=1024)
def bucket_of(size: int) -> int:
    """Return the largest size of the bucket of a size: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, …."""
    if size <= 3:
        return max(size, 1)
    power = 1 << (size - 1).bit_length()  # the next power of two
    between = power * 3 // 4
    return between if size <= between else power


def line_through(points: Sequence[Point]) -> tuple[float, float]:
    """Fit costs by a straight line: seconds per item, seconds per batch; neither negative.

    Least squares of relative errors, each point weighted by its batches up to 50. Of one point, the
    cost is that of the batch.
    """
    if len(points) < 2:
        return 0.0, points[0].seconds if points else 0.0
    weights = [float(min(point.batches, _MAX_LINE_WEIGHT)) for point in points]
    slope, start = _fit(points, weights)
    expected = [start + slope * point.size for point in points]
    return _fit(points, [w / seconds**2 for w, seconds in zip(weights, expected, strict=True)])


def _fit(points: Sequence[Point], weights: Sequence[float]) -> tuple[float, float]:
    """Return slope and start of the line with the least squares; neither is negative."""
    weighted = list(zip(weights, points, strict=True))
    total = sum(weights)
    size = sum(weight * point.size for weight, point in weighted) / total
    seconds = sum(weight * point.seconds for weight, point in weighted) / total
    spread = sum(weight * (point.size - size) ** 2 for weight, point in weighted)
    joint = sum(w * (point.size - size) * (point.seconds - seconds) for w, point in weighted)
    slope = min(max(0.0, joint / spread), seconds / size)
    return slope, seconds - slope * size
