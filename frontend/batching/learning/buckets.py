"""Buckets: the cost of batches of about one size, and the line through the costs of all sizes."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
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


class _Sample(NamedTuple):
    """A cost: size, seconds, and the number of the sample among those of all sizes.

    -1 is that of a measurement without traffic.
    """

    size: float
    seconds: float
    number: int


@dataclass(slots=True, eq=False)
class Bucket:
    """Batches of about one size; seconds are without the common factor of the latency model."""

    size: float
    seconds: float = 0.0
    median: float = 0.0  # of the first costs
    count: int = 0
    is_profiled: bool = False  # whether the cost was measured without traffic
    _first: list[_Sample] = field(default_factory=list)

    @property
    def observed(self) -> float:
        """Seconds without the limit on those of rarely seen sizes."""
        return self.median if self.count < BELIEVED_SAMPLES else self.seconds

    @property
    def weight(self) -> int:
        """The number of samples in the mean; a median of five is as good as a mean of three."""
        return max(1, self.count - FIRST_SAMPLES + 3)

    def learn_first(self, size: float, seconds: float, number: int = -1) -> None:
        """Learn from one of the first samples."""
        self.count += 1
        self._first.append(_Sample(size, seconds, number))
        self._use_median()

    def _use_median(self) -> None:
        by_seconds = sorted(self._first, key=attrgetter("seconds"))
        self.size, self.seconds, _ = by_seconds[(len(by_seconds) - 1) // 2]
        self.median = self.seconds

    def rescale_first(self, factor: float, number: int) -> None:
        """Multiply the first samples from this number on by a factor, unless there are others."""
        if self.count <= FIRST_SAMPLES:
            self._first = [
                each._replace(seconds=factor * each.seconds) if each.number >= number else each
                for each in self._first
            ]
            self._use_median()

    def restart(self, size: float, seconds: float) -> None:
        """Forget all samples, and learn from one."""
        self.count, self.is_profiled = 0, False
        self._first.clear()
        self.learn_first(size, seconds)

    def move(self, size: int, expected: float) -> None:
        """Move the mean size towards that of a sample, and the cost towards its expected cost."""
        self.size += _STEP * (size - self.size)
        self.seconds += _STEP * (expected - self.seconds)


#: The size of a bucket, as a key for `bisect`.
SIZE_OF: Callable[[Bucket], float] = attrgetter("size")


class Buckets:
    """The buckets of one latency model, ``rising`` by size."""

    def __init__(self) -> None:
        self.rising: list[Bucket] = []
        self._by_largest: dict[int, Bucket] = {}

    def find(self, size: int) -> Bucket | None:
        """Return the bucket of a size, if there is one."""
        return self._by_largest.get(bucket_of(size))

    def of(self, size: int) -> Bucket:
        """Return the bucket of a size, a new one if there is none."""
        bucket = self.find(size)
        if bucket is None:
            bucket = self._by_largest[bucket_of(size)] = Bucket(size)
            insort(self.rising, bucket, key=SIZE_OF)
        return bucket

    def slope_at(self, bucket: Bucket) -> float:
        """Return the seconds per item from the bucket below, of the first to the one above."""
        index = self.rising.index(bucket)
        left, right = self.rising[max(0, index - 1)], bucket
        if not index:
            right = self.rising[min(1, len(self.rising) - 1)]
        if left is right:
            return 0.0
        return max(0.0, (right.seconds - left.seconds) / (right.size - left.size))

    def limit_new(self) -> None:
        """Limit the cost per item of rarely seen sizes to that of the next smaller bucket.

        Otherwise, if the first batch of a size was slow because code was compiled, policies with
        deadlines would never run a second one.
        """
        for below, bucket in pairwise(self.rising):
            if bucket.count < BELIEVED_SAMPLES:
                bucket.seconds = min(bucket.median, below.seconds * bucket.size / below.size)


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
