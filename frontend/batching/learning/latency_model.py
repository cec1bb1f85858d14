"""The latency model: the cost of a batch by its size, learnt from the batches that ran.

Sizes are grouped in buckets (1, 2, 3, 4, 6, 8, 12, 16, …), each with the mean size and the mean
time of its batches. Between buckets the cost is interpolated; beyond the largest one it follows the
line through all of them. All are multiplied by a common factor, the present speed of the machine.
Most of each correction goes into this factor, so a slower machine changes all sizes at once.

While there is only one bucket, larger batches are taken to cost the same. That is too low, but the
next batch under load corrects it. (No batch corrects costs in proportion to the size.)
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from marserve.frontend.batching.learning.buckets import (
    BELIEVED_SAMPLES,
    FIRST_SAMPLES,
    SIZE_OF,
    Bucket,
    Buckets,
    Point,
    line_through,
)
from marserve.frontend.batching.learning.cost_distribution import CostDistribution
from marserve.frontend.batching.learning.costs import MIN_SECONDS

# How much of a correction is the newest sample.
_STEP = 0.15
# The share of a correction that a bucket takes for itself once it has been seen often; the common
# factor takes the rest.
_OWN_SHARE = 0.15
_DEVIATION_STEP = 0.05
_SENDING_STEP = 0.1
# The mean of a size is known when its standard error is about this share of it.
_KNOWN_WITHIN = 0.1
# A sample that deviates by this many mean deviations is an outlier and does not change the mean: a
# pause for garbage collection, a compilation, another process.
_OUTLIER_DEVIATIONS = 5.0
# After this many outliers in a row, all on one side, the cost has changed.
_MAX_OUTLIERS = 3
_FIRST_DEVIATION = 0.1
_MIN_DEVIATION = 0.02
# The number of samples that the first guess of the deviation counts for.
_GUESSED_SAMPLES = 5
# Where batches deviate more than this from what is expected, a single batch has little weight:
# steps are smaller, and differences between adjacent sizes are not used.
_NOISY = 0.12
# By how much the costs of sizes depart from a line through all of them.
_CURVED = 0.2
# From this deviation on, errors are taken for noise and not for a change of the machine.
_VERY_NOISY = 0.35
#: The share of batches that do not exceed the high estimate.
BOUND_SHARE = 0.97
# The share of batches that are faster than any outlier below.
_LOW_SHARE = 0.01
# The number of samples that a first guess counts for when steps become smaller.
_STEP_SAMPLES = 8
# The factor on the bound until there are enough samples.
_UNSURE = 1.3
_SURE_SAMPLES = 8
# The line through the buckets is calculated again after this many samples.
_LINE_SAMPLES = 16
# A line through fewer buckets does not correct any of them.
_MIN_LINE_POINTS = 3
# The mean of a size is drawn towards the line only if noise does so by at least this share.
_LITTLE_NOISE = 0.5


class LatencyModel:
    """The learnt cost of batches of one model version."""

    def __init__(self) -> None:
        self.samples = 0
        self.distribution = CostDistribution()
        self.deviation = _FIRST_DEVIATION  # mean, as a share of the expected seconds
        self._buckets = Buckets()
        self._factor = 1.0
        self._drift = 0.0
        self._compared = 0
        self._expected_until = 0  # the number of the last sample within the expected range
        self._outliers: list[tuple[Bucket, float]] = []
        self._sending = 0.0
        self._slope = self._start = 0.0
        self._slope_until = 0
        self._means: dict[float, float] = {}
        self._bounds: dict[float, float] = {}

    @property
    def is_known(self) -> bool:
        """Whether any cost was learnt."""
        return bool(self._buckets.rising)

    @property
    def is_even(self) -> bool:
        """Whether batches of one size take about the same time.

        If not, the machine has other work, and costs measured without traffic do not hold in it.
        """
        return self.deviation <= _NOISY

    def knows(self, size: int) -> bool:
        """Return whether the mean of this size was profiled, or seen often enough for its noise."""
        bucket = self._buckets.find(size)
        return bucket is not None and (bucket.is_profiled or self.knows_by_traffic(size))

    def knows_by_traffic(self, size: int) -> bool:
        """Return whether the mean of this size was seen often enough for its noise."""
        needed = max(BELIEVED_SAMPLES, (self.deviation / _KNOWN_WITHIN) ** 2)
        return self.batches_of(size) >= needed

    def batches_of(self, size: int) -> int:
        """Return how many batches of about this size were seen; profiling counts as five."""
        bucket = self._buckets.find(size)
        return bucket.count if bucket else 0

    def mean(self, size: float) -> float:
        """Return the mean seconds of a batch of this size; 0 while nothing is known."""
        mean = self._means.get(size)
        if mean is None:
            mean = self._means[size] = self._factor * self._own_seconds(size)
        return mean

    def bound(self, size: float) -> float:
        """Return the 97th percentile, with the sending of answers; 0 while nothing is known."""
        bound = self._bounds.get(size)
        if bound is None:
            unsure = _UNSURE if self.samples < _SURE_SAMPLES else 1.0
            bound = unsure * self._highest_up_to(size) * self.distribution.quantile(BOUND_SHARE)
            bound = self._bounds[size] = bound + self._sending
        return bound

    def until_answered(self, size: float) -> float:
        """Return the mean seconds until the answers of a batch are sent; see `mean`."""
        return self.mean(size) + self._sending

    @property
    def points(self) -> Sequence[Point]:
        """The buckets in the order of their sizes."""
        factor = self._factor
        return [
            Point(each.size, factor * each.seconds, each.count) for each in self._buckets.rising
        ]

    @property
    def observed_points(self) -> Sequence[Point]:
        """The same with the costs as they were, also of sizes that were seen once."""
        factor = self._factor
        return [
            Point(each.size, factor * each.observed, each.count) for each in self._buckets.rising
        ]

    def line(self) -> tuple[float, float]:
        """Fit the costs by a straight line (`line_through`)."""
        return line_through(self.points)

    # -- learning ----------------------------------------------------------------------------------

    def observe(self, size: int, seconds: float) -> None:
        """Learn from a batch."""
        self.samples += 1
        seconds = max(seconds, MIN_SECONDS)
        bucket = self._buckets.of(size)
        if bucket.count < FIRST_SAMPLES:
            bucket.learn_first(size, seconds / self._factor, self.samples)
            self._buckets.limit_new()
            self._slope_until = 0
        else:
            expected = self._expected(bucket, size)
            bucket.move(size, expected)
            ratio = seconds / self.mean(size)
            self._compare(bucket, seconds / (self._factor * expected))
            self.distribution.observe(ratio)
        self._forget_derived()

    def observe_sending(self, seconds: float) -> None:
        """Learn how long after its end a batch's last answer was sent; deadlines include it."""
        self._sending += _SENDING_STEP * (seconds - self._sending)
        self._bounds.clear()

    def seed(self, points: Iterable[tuple[float, float]]) -> None:
        """Learn from pairs of size and seconds, except for sizes with enough traffic already."""
        for size, seconds in points:
            bucket = self._buckets.of(round(size))
            if bucket.count <= FIRST_SAMPLES:
                for _ in range(FIRST_SAMPLES):
                    bucket.learn_first(size, max(seconds, MIN_SECONDS) / self._factor)
                bucket.is_profiled = True
                self.samples += _SURE_SAMPLES
        self._buckets.limit_new()
        self._slope_until = 0
        self._forget_derived()

    def relearn(self, points: Iterable[tuple[float, float]]) -> None:
        """Forget all costs and learn from these instead: pairs of size and seconds."""
        points = list(points)
        before, self._buckets = self._buckets, Buckets()
        self._outliers.clear()
        self._factor = 1.0
        self.seed(points)
        for bucket in self._buckets.rising:
            known = before.find(round(bucket.size))
            bucket.is_profiled = known is not None and known.is_profiled

    def forget(self, size: int, seconds: float) -> None:
        """Forget what batches of a size cost before the last one, which took these seconds."""
        bucket = self._buckets.of(size)
        bucket.restart(size, max(seconds, MIN_SECONDS) / self._factor)
        self._slope_until = 0
        self._forget_derived()

    def _expected(self, bucket: Bucket, size: int) -> float:
        """Return the seconds for a size of this bucket, without the common factor."""
        seconds = bucket.seconds
        if size == bucket.size:
            return seconds
        is_noisy = self.deviation > _NOISY
        slope = self._own_slope if is_noisy else self._buckets.slope_at(bucket)
        # At least half of it: a slope that is only noise must not make the cost 0.
        return max(seconds + slope * (size - bucket.size), seconds / 2)

    def _compare(self, bucket: Bucket, ratio: float) -> None:
        """Learn from a sample that took ``ratio`` times what was expected."""
        widest = 1.0 + _OUTLIER_DEVIATIONS * self.deviation
        lowest = min(1.0 / widest, self.distribution.quantile(_LOW_SHARE))
        if lowest <= ratio <= widest:
            self._outliers.clear()
            self._expected_until = self.samples
            self._share_error(bucket, ratio - 1.0)
        else:
            self._note_outlier(bucket, ratio)
        bucket.count += 1
        self._compared += 1
        step = max(_DEVIATION_STEP, 1.0 / (self._compared + _GUESSED_SAMPLES))
        error = min(ratio, widest) - 1.0
        self._drift += step * (error - self._drift)
        deviation = self.deviation + step * (abs(error) - self.deviation)
        self.deviation = max(_MIN_DEVIATION, deviation)

    def _share_error(self, bucket: Bucket, error: float) -> None:
        """Correct the common factor and a bucket for the relative error of a sample.

        As in a Kalman filter, each takes a part of the error according to its uncertainty, and the
        rest is the sample's.
        """
        # Errors to one side are not noise: the machine has become slower, or faster.
        deviation = self.deviation - abs(self._drift)
        noise = max(1.0, deviation / _NOISY)
        step = max(_STEP / noise, min(_STEP, 1.0 / (self._compared + _STEP_SAMPLES)))
        own_share = max(_OWN_SHARE, 1.0 / (bucket.count - FIRST_SAMPLES + 2))
        of_factor = step / (1.0 - step)
        of_bucket = max(
            of_factor * own_share / (1.0 - own_share),
            min(1.0, max(0.0, deviation) / _VERY_NOISY) ** 2 / bucket.weight,
        )
        total = 1.0 + of_factor + of_bucket
        self._factor *= 1.0 + of_factor / total * error
        bucket.seconds *= 1.0 + of_bucket / total * error

    def _note_outlier(self, bucket: Bucket, ratio: float) -> None:
        outliers = self._outliers
        if outliers and (outliers[-1][1] > 1.0) is not (ratio > 1.0):
            outliers.clear()
        outliers.append((bucket, ratio))
        if len(outliers) == _MAX_OUTLIERS:
            ratios = [ratio for _, ratio in outliers]
            least = min(ratios) if ratio > 1.0 else max(ratios)
            # If several sizes deviate, the machine has changed, not the cost of one size.
            own_share = _OWN_SHARE if all(other is bucket for other, _ in outliers) else 0.0
            change = least ** (1.0 - own_share)
            self._factor *= change
            for each in self._buckets.rising:  # their latest samples contain the change
                each.rescale_first(1.0 / change, self._expected_until)
            self._buckets.limit_new()
            self._slope_until = 0
            bucket.seconds *= least**own_share
            outliers.clear()

    def _forget_derived(self) -> None:
        self._means.clear()
        self._bounds.clear()

    # -- estimating --------------------------------------------------------------------------------

    def _own_seconds(self, size: float) -> float:
        """Return the mean of a size, without the common factor."""
        rising = self._buckets.rising
        if not rising:
            return 0.0
        index = bisect_left(rising, float(size), key=SIZE_OF)
        if index == len(rising):
            last = rising[-1]
            return self._believed(last) + self._own_slope * (size - last.size)
        right = rising[index]
        if right.size == size or len(rising) < 2:  # below the only one it may be no cheaper at all
            return self._believed(right)
        if index == 0:
            by_line = self._believed(right) - self._own_slope * (right.size - size)
            return max(by_line, self._believed(right) * size / right.size)
        left = rising[index - 1]
        share = (size - left.size) / (right.size - left.size)
        return self._believed(left) + share * (self._believed(right) - self._believed(left))

    def _believed(self, bucket: Bucket) -> float:
        """Return the mean of a bucket, drawn towards the line by the noise; no common factor."""
        if self.deviation <= _NOISY:
            return bucket.seconds
        noise = (self.deviation / _CURVED) ** 2
        if noise < _LITTLE_NOISE * bucket.weight or len(self._buckets.rising) < _MIN_LINE_POINTS:
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
        for bucket in self._buckets.rising:
            if bucket.size >= size:
                break
            highest = max(highest, self._factor * self._believed(bucket))
        return highest
