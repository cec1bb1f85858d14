"""The latency model: the cost of a batch by its size, learnt from the batches that ran.

Sizes are grouped in buckets (1, 2, 3, 4, 6, 8, 12, 16, …), each with the mean size and the mean
time of its batches; between buckets the cost is interpolated. Beyond the largest bucket it follows
the line through all buckets.

While there is only one bucket, larger batches are taken to cost the same. That is too low, but
requests are refused by it only where they are surely late, and under load the next batch shows what
large ones cost: the loss is one batch for each worker. (Costs in proportion to the size refused
most of the first requests of models that batch well: with four workers up to 87 of the first 300,
in simulation, and they were not admitted in batches that would have shown better.)

The cost is the time of the bucket multiplied by a common factor, for the speed of the machine at
present. The factor takes most of each correction, so that a slower machine is noticed for all sizes
at once.
"""

import statistics
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, Protocol

from marserve.frontend.batching.learning.cost_distribution import CostDistribution

# Step of the exponentially weighted means: how much of them is the newest sample.
_STEP = 0.15
# The share of a correction that a bucket takes for itself once it has been seen often; the common
# factor takes the rest.
_OWN_SHARE = 0.15
_DEVIATION_STEP = 0.05
_SENDING_STEP = 0.1
# A bucket uses the median of its first samples, while caches fill and code is compiled.
_FIRST_SAMPLES = 5
# The mean of a size is known when its standard error is about this share of it.
_KNOWN_WITHIN = 0.1
# The number of samples from which on a slow one does not count: of two the faster one does, of more
# the median.
_BELIEVED_SAMPLES = 2
# A sample that deviates by this many mean deviations is an outlier and does not change the mean: a
# pause for garbage collection, a compilation, another process.
_OUTLIER_DEVIATIONS = 5.0
# After this many outliers in a row, all on one side, the cost has changed.
_MAX_OUTLIERS = 3
_FIRST_DEVIATION = 0.1
_MIN_DEVIATION = 0.02
# How many samples the first guess of the deviation counts for.
_GUESSED_SAMPLES = 5
# Where batches deviate more than this from what is expected, one of them says little: smaller
# steps, and no difference between neighbouring sizes is believed.
_NOISY = 0.12
# By how much the costs of sizes depart from a line through all of them.
_CURVED = 0.2
# From this deviation on, errors are taken for noise and not for a change of the machine.
_VERY_NOISY = 0.35
# The share of batches that do not exceed the high estimate.
BOUND_SHARE = 0.97
# The share of batches that are faster than any outlier below.
_LOW_SHARE = 0.01
# A first guess counts as so many samples when steps become smaller.
_STEP_SAMPLES = 8
# The factor on the bound until there are enough samples.
_UNSURE = 1.3
_SURE_SAMPLES = 8
# The line through the buckets is calculated again after this many samples.
_LINE_SAMPLES = 16
# A line through fewer buckets says nothing about any of them.
_MIN_LINE_POINTS = 3
# Where noise would draw the mean of a size towards the line by less than this share, it does not.
_LITTLE_NOISE = 0.5
#: The least time of a batch; without it a coarse clock could make a cost of 0.
MIN_SECONDS = 1e-6


class Point(NamedTuple):
    """The present state of a bucket: mean size, mean seconds, number of batches."""

    size: float
    seconds: float
    batches: int


class Costs(Protocol):
    """Predicts the cost of batches, for policies."""

    @property
    def is_known(self) -> bool:
        """Whether anything is known at all."""

    def mean(self, size: float) -> float:
        """The mean seconds of a batch of this size."""

    def bound(self, size: float) -> float:
        """A high estimate of the seconds of a batch of this size; never falls with larger sizes."""

    def chance(self, size: float, seconds: float) -> float:
        """The chance that a batch of this size is done within so many seconds."""


class LatencyModel:
    """The learnt cost of batches of one model version.

    Attributes:
        samples: Number of batches that were learnt from.
        distribution: How much batches depart from their mean.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._rising: list[_Bucket] = []
        self._factor = 1.0
        self._deviation = _FIRST_DEVIATION
        self._drift = 0.0
        self._compared = 0
        self._outliers: list[tuple[_Bucket, float]] = []
        self._sending = 0.0
        self.distribution = CostDistribution()
        self.samples = 0
        self._slope = self._start = 0.0
        self._slope_until = 0
        self._means: dict[float, float] = {}
        self._bounds: dict[float, float] = {}

    @property
    def is_known(self) -> bool:
        """See `Costs.is_known`."""
        return bool(self._buckets)

    def knows(self, size: int) -> bool:
        """Whether the mean of this size is known: profiled, or seen often enough for its noise."""
        bucket = self._buckets.get(bucket_of(size))
        if bucket is None:
            return False
        needed = max(_BELIEVED_SAMPLES, (self._deviation / _KNOWN_WITHIN) ** 2)
        return bucket.is_profiled or bucket.count >= needed

    def batches_of(self, size: int) -> int:
        """How many batches of about this size were seen; profiling counts as five."""
        bucket = self._buckets.get(bucket_of(size))
        return bucket.count if bucket else 0

    def forget(self, size: int, seconds: float) -> None:
        """Forget what batches of a size cost before the last one, which took these seconds."""
        bucket = self._buckets[bucket_of(size)]
        bucket.restart(size, max(seconds, MIN_SECONDS) / self._factor)
        self._slope_until = 0
        self._forget_derived()

    @property
    def deviation(self) -> float:
        """The mean deviation of batches from their expected seconds, as a share of these."""
        return self._deviation

    def seed(self, points: Iterable[tuple[float, float]]) -> None:
        """Learn from pairs of size and seconds, except for sizes with enough traffic already."""
        for size, seconds in points:
            bucket = self._bucket(round(size))
            if bucket.count <= _FIRST_SAMPLES:
                for _ in range(_FIRST_SAMPLES):
                    bucket.learn_first(size, max(seconds, MIN_SECONDS) / self._factor)
                bucket.is_profiled = True
                self.samples += _SURE_SAMPLES
        self._limit_new_buckets()
        self._forget_derived()

    def relearn(self, points: Iterable[tuple[float, float]]) -> None:
        """Forget all costs and learn from these instead: pairs of size and seconds."""
        points = list(points)
        profiled = {key for key, bucket in self._buckets.items() if bucket.is_profiled}
        self._buckets.clear()
        self._rising.clear()
        self._outliers.clear()
        self._factor = 1.0
        self.seed(points)
        for key, bucket in self._buckets.items():
            bucket.is_profiled = key in profiled

    def observe(self, size: int, seconds: float) -> None:
        """Learn from a batch."""
        self.samples += 1
        seconds = max(seconds, MIN_SECONDS)
        bucket = self._buckets.get(bucket_of(size)) or self._bucket(size)
        if bucket.count < _FIRST_SAMPLES:
            bucket.learn_first(size, seconds / self._factor)
            self._limit_new_buckets()
        else:
            expected = self._expected(bucket, size)
            bucket.move(size, expected)
            ratio = seconds / self.mean(size)
            self._compare(bucket, seconds / (self._factor * expected))
            self.distribution.observe(ratio)
        self._forget_derived()

    def mean(self, size: float) -> float:
        """See `Costs.mean`; 0 while nothing is known."""
        mean = self._means.get(size)
        if mean is None:
            mean = self._means[size] = self._factor * self._own_seconds(size)
        return mean

    def bound(self, size: float) -> float:
        """See `Costs.bound`: the 97th percentile, with the sending; 0 if nothing is known."""
        bound = self._bounds.get(size)
        if bound is None:
            unsure = _UNSURE if self.samples < _SURE_SAMPLES else 1.0
            bound = unsure * self._highest_up_to(size) * self.distribution.quantile(BOUND_SHARE)
            bound = self._bounds[size] = bound + self._sending
        return bound

    def chance(self, size: float, seconds: float) -> float:
        """See `Costs.chance`; while nothing is known, a batch is taken to cost nothing."""
        mean = self.mean(size)
        if not mean:
            return float(seconds >= self._sending)
        return self.distribution.chance((seconds - self._sending) / mean)

    def observe_sending(self, seconds: float) -> None:
        """Learn how long after the end of a batch the last of its answers was sent.

        Deadlines include that time.
        """
        self._sending += _SENDING_STEP * (seconds - self._sending)
        self._bounds.clear()

    @property
    def points(self) -> Sequence[Point]:
        """The buckets in the order of their sizes, as they are now."""
        factor = self._factor
        return [Point(each.size, factor * each.seconds, each.count) for each in self._rising]

    @property
    def observed_points(self) -> Sequence[Point]:
        """The same with the costs as they were, of sizes that were seen once, too."""
        factor = self._factor
        return [Point(each.size, factor * each.observed, each.count) for each in self._rising]

    def line(self) -> tuple[float, float]:
        """The cost as a straight line: seconds per item, seconds per batch; neither negative.

        Least squares of relative errors, each bucket weighted by its batches up to 50; of one
        bucket, all of the cost is taken for the batch's.
        """
        points = self.points
        if len(points) < 2:
            return 0.0, points[0].seconds if points else 0.0
        weights = [float(min(point.batches, 50)) for point in points]
        slope, start = _fit(points, weights)
        expected = [start + slope * point.size for point in points]
        return _fit(points, [w / seconds**2 for w, seconds in zip(weights, expected, strict=True)])

    # -- learning ----------------------------------------------------------------------------------

    def _bucket(self, size: int) -> "_Bucket":
        key = bucket_of(size)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(size)
            insort(self._rising, bucket, key=_size_of)
        return bucket

    def _expected(self, bucket: "_Bucket", size: int) -> float:
        """Seconds for a size of this bucket, without the common factor."""
        seconds = bucket.seconds
        if size == bucket.size:
            return seconds
        # At least half of it: a slope that is only noise must not make the cost 0.
        return max(seconds + self._slope_at(bucket) * (size - bucket.size), seconds / 2)

    def _slope_at(self, bucket: "_Bucket") -> float:
        """Seconds per item from the bucket below, or else to the one above; no common factor."""
        if self._deviation > _NOISY:
            return self._own_slope
        place = self._rising.index(bucket)
        left, right = self._rising[max(0, place - 1)], bucket
        if not place:
            right = self._rising[min(1, len(self._rising) - 1)]
        if left is right:
            return 0.0
        return max(0.0, (right.seconds - left.seconds) / (right.size - left.size))

    def _compare(self, bucket: "_Bucket", ratio: float) -> None:
        """Learn from a sample that took ``ratio`` times what was expected."""
        widest = 1.0 + _OUTLIER_DEVIATIONS * self._deviation
        lowest = min(1.0 / widest, self.distribution.quantile(_LOW_SHARE))
        if lowest <= ratio <= widest:
            self._outliers.clear()
            self._share_error(bucket, ratio - 1.0)
        else:
            self._note_outlier(bucket, ratio)
        bucket.count += 1
        self._compared += 1
        step = max(_DEVIATION_STEP, 1.0 / (self._compared + _GUESSED_SAMPLES))
        error = min(ratio, widest) - 1.0
        self._drift += step * (error - self._drift)
        deviation = self._deviation + step * (abs(error) - self._deviation)
        self._deviation = max(_MIN_DEVIATION, deviation)

    def _share_error(self, bucket: "_Bucket", error: float) -> None:
        """Correct the common factor and a bucket for the relative error of a sample.

        As in a Kalman filter, each takes a part of the error according to how uncertain it is, and
        the rest is the sample's: the factor may have changed since the last one; the mean of a
        bucket is as uncertain as the noise of its samples by their number.
        """
        # Errors to one side are no noise: the machine has become slower, or faster.
        deviation = self._deviation - abs(self._drift)
        noise = max(1.0, deviation / _NOISY)
        step = max(_STEP / noise, min(_STEP, 1.0 / (self._compared + _STEP_SAMPLES)))
        own_share = max(_OWN_SHARE, 1.0 / (bucket.count - _FIRST_SAMPLES + 2))
        of_factor = step / (1.0 - step)
        of_bucket = max(
            of_factor * own_share / (1.0 - own_share),
            min(1.0, max(0.0, deviation) / _VERY_NOISY) ** 2 / bucket.weight,
        )
        total = 1.0 + of_factor + of_bucket
        self._factor *= 1.0 + of_factor / total * error
        bucket.seconds *= 1.0 + of_bucket / total * error

    def _note_outlier(self, bucket: "_Bucket", ratio: float) -> None:
        outliers = self._outliers
        if outliers and (outliers[-1][1] > 1.0) is not (ratio > 1.0):
            outliers.clear()
        outliers.append((bucket, ratio))
        if len(outliers) == _MAX_OUTLIERS:
            ratios = [ratio for _, ratio in outliers]
            # If several sizes deviate, the machine has changed, not the cost of one size.
            own_share = _OWN_SHARE if all(other is bucket for other, _ in outliers) else 0.0
            self._correct(bucket, min(ratios) if ratio > 1.0 else max(ratios), own_share)
            outliers.clear()

    def _correct(self, bucket: "_Bucket", ratio: float, own_share: float) -> None:
        self._factor *= ratio ** (1.0 - own_share)
        bucket.seconds *= ratio**own_share

    def _limit_new_buckets(self) -> None:
        """Limit the cost per item of rarely seen sizes to that of the next smaller bucket.

        Otherwise a first batch that was slow because code was compiled would keep policies with
        deadlines from ever running a second one of that size.
        """
        below: _Bucket | None = None
        for bucket in self._rising:
            if below is not None and bucket.count < _BELIEVED_SAMPLES:
                bucket.seconds = min(bucket.median, below.seconds * bucket.size / below.size)
            below = bucket
        self._slope_until = 0

    def _forget_derived(self) -> None:
        self._means.clear()
        self._bounds.clear()

    # -- estimating --------------------------------------------------------------------------------

    def _own_seconds(self, size: float) -> float:
        """The mean of a size, without the common factor."""
        rising = self._rising
        if not rising:
            return 0.0
        place = bisect_left(rising, float(size), key=_size_of)
        if place == len(rising):
            last = rising[-1]
            return self._believed(last) + self._own_slope * (size - last.size)
        right = rising[place]
        if right.size == size or len(rising) < 2:  # below the only one it may be no cheaper at all
            return self._believed(right)
        if place == 0:
            by_line = self._believed(right) - self._own_slope * (right.size - size)
            return max(by_line, self._believed(right) * size / right.size)
        left = rising[place - 1]
        share = (size - left.size) / (right.size - left.size)
        return self._believed(left) + share * (self._believed(right) - self._believed(left))

    def _believed(self, bucket: "_Bucket") -> float:
        """The mean of a bucket, without the common factor; with noise, drawn towards the line.

        How far, follows from the noise of its samples and their number, if the costs of sizes
        depart from a line by as much as `_CURVED`.
        """
        if self._deviation <= _NOISY:
            return bucket.seconds
        noise = (self._deviation / _CURVED) ** 2
        if noise < _LITTLE_NOISE * bucket.weight or len(self._rising) < _MIN_LINE_POINTS:
            return bucket.seconds
        slope = self._own_slope
        by_line = self._start + slope * bucket.size
        return (bucket.weight * bucket.seconds + noise * by_line) / (bucket.weight + noise)

    @property
    def _own_slope(self) -> float:
        """Seconds per item of the line through all, without the common factor; sets `_start`."""
        if self.samples >= self._slope_until:
            slope, start = self.line()
            self._slope = slope / self._factor
            self._start = start / self._factor
            self._slope_until = self.samples + _LINE_SAMPLES
        return self._slope

    def _highest_up_to(self, size: float) -> float:
        highest = self.mean(size)
        for bucket in self._rising:
            if bucket.size >= size:
                break
            highest = max(highest, self._factor * self._believed(bucket))
        return highest


@dataclass(slots=True, eq=False)
class _Bucket:
    """Batches of about one size: mean size, mean cost, the median of their first costs.

    Seconds are without the common factor.
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
        return self.median if self.count < _BELIEVED_SAMPLES else self.seconds

    def learn_first(self, size: float, seconds: float) -> None:
        """Learn from one of the first samples."""
        self.count += 1
        self._first.append((size, seconds))
        self.size = statistics.fmean(size for size, _ in self._first)
        costs = [seconds for _, seconds in self._first]
        self.seconds = self.median = statistics.median_low(costs)

    def restart(self, size: float, seconds: float) -> None:
        """Begin again with one sample."""
        self.count, self.is_profiled = 0, False
        self._first.clear()
        self.learn_first(size, seconds)

    @property
    def weight(self) -> int:
        """By how many samples the mean is known: a median of five is as good as a mean of three."""
        return max(1, self.count - _FIRST_SAMPLES + 3)

    def move(self, size: int, expected: float) -> None:
        """Move the mean size towards that of a sample, and the cost towards its expected cost."""
        self.size += _STEP * (size - self.size)
        self.seconds += _STEP * (expected - self.seconds)


_size_of: Callable[[_Bucket], float] = attrgetter("size")


def _fit(points: Sequence[Point], weights: Sequence[float]) -> tuple[float, float]:
    """The slope and the start of the line with the least squares; neither is negative."""
    weighted = list(zip(weights, points, strict=True))
    total = sum(weights)
    size = sum(weight * point.size for weight, point in weighted) / total
    seconds = sum(weight * point.seconds for weight, point in weighted) / total
    spread = sum(weight * (point.size - size) ** 2 for weight, point in weighted)
    joint = sum(w * (point.size - size) * (point.seconds - seconds) for w, point in weighted)
    slope = min(max(0.0, joint / spread), seconds / size)
    return slope, seconds - slope * size


@lru_cache(maxsize=1024)
def bucket_of(size: int) -> int:
    """The largest size that counts as the same: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, …."""
    if size <= 3:
        return max(size, 1)
    power = 1 << (size - 1).bit_length()  # the next power of two
    between = power * 3 // 4
    return between if size <= between else power
