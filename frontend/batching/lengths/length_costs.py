"""The cost of a batch by its size and the length of its longest item.

Shorter items are padded to the longest of their batch, so that this one decides the cost of all.
The cost is learnt as

    seconds = a + b·n + c·x + d·n·x + e·n·x²        n items, the longest of length x

by least squares of relative errors, with weights that fade, and no coefficient negative: a longer
batch never costs less. ``d`` is the padded work of most layers, ``e`` that of attention, and ``c``
the steps of recurrent or autoregressive models.

The speed of the machine is learnt by the latency model. `CostsByLength` takes from here only the
cost of a length relative to that of the reference length.
"""

import math
from collections.abc import Sequence
from operator import mul

from marserve.frontend.batching.learning.latency_model import LatencyModel

# A sample's weight fades by this with each later one: about the last 200 batches count.
_FADING = 1 - 1 / 200
# At first, a batch is taken to cost as much as the items it is padded to and four more of typical
# length; only the factor is learnt. All coefficients are learnt from this many batches on.
_MIN_SAMPLES = 16
# From this number on, the overhead and the padded work are learnt separately.
_FEW_SAMPLES = 5
_ASSUMED_OVERHEAD = 4.0
# The weight of that assumption later, relative to batches: it decides only what these leave open,
# such as the cost of two items if all have run alone.
_ASSUMED_WEIGHT = 0.01
# The coefficients are calculated again after this many batches, at first and later.
_FIT_SAMPLES, _LATER_FIT_SAMPLES = 4, 16
_MANY_SAMPLES = 100
_SWEEPS = 60
_BY_SIZE = (0, 1)
_BY_PADDED_WORK = (0, 3)
_BY_LENGTH = (0, 1, 2, 3, 4)
_TYPICAL_STEP = 0.05
# A job is refused if it would be late in its batch with this share of the items that it lacks to a
# full one. With 0 long jobs are run in small batches, which cost the capacity of many short ones;
# with 1 long jobs starve: at a load of 0.9 a third of the longest tenth is in time. At 1.3
# the share 0.1 leaves the longest tenth what a proportionally fair schedule would.
_MISSING_SHARE = 0.1
# The least cost of an empty item, relative to one of typical length.
_MIN_FACTOR = 0.001

#: Seconds of a batch of ``size`` whose longest item has length x: ``p + q·x + r·x²``.
Row = tuple[int, float, float, float]


class LengthCosts:
    """The learnt cost of batches by size and longest item."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all batches."""
        self.samples = 0
        self.typical = 0.0  # the longest item, averaged over the last batches
        #: The share of the cost's variance between batches of one size that lengths explain; that
        #: variance, as a relative standard deviation.
        self.explained = self.spread = 0.0
        self._coefficients = [0.0] * 5
        # The sums of the least squares: products of features, and features (the target is 1).
        self._products = [[0.0] * 5 for _ in range(5)]
        self._sums = [0.0] * 5
        self._weight = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there were enough batches to learn all coefficients."""
        return self.samples >= _MIN_SAMPLES

    def observe(self, size: int, longest: float, seconds: float) -> bool:
        """Learn from a batch; return whether the coefficients have changed."""
        self.samples += 1
        self.typical += max(_TYPICAL_STEP, 1 / self.samples) * (longest - self.typical)
        # Divided by the seconds, so that errors are relative.
        each = 1.0 / seconds
        features = [
            each,
            each * size,
            each * longest,
            each * size * longest,
            each * size * longest * longest,
        ]
        for index, feature in enumerate(features):
            self._sums[index] = self._sums[index] * _FADING + feature
            row = self._products[index]
            for other, value in enumerate(features):
                row[other] = row[other] * _FADING + feature * value
        self._weight = self._weight * _FADING + 1.0
        if not self.is_known:
            self._coefficients = self._assumption()
            if self.samples >= _FEW_SAMPLES:
                self._fit(_BY_PADDED_WORK)
            return True
        pause = _FIT_SAMPLES if self.samples < _MANY_SAMPLES else _LATER_FIT_SAMPLES
        if self.samples % pause:
            return False
        self._fit(_BY_LENGTH)
        return True

    def seconds(self, size: int, longest: float) -> float:
        """Return the mean cost of a batch; 0 while nothing is known."""
        _, p, q, r = self.row(size)
        return p + q * longest + r * longest * longest

    def row(self, size: int, typical: float = 0.0) -> Row:
        """Return the cost of batches of a size by length.

        Before the first batch, costs are only proportional, for jobs of the ``typical`` length.
        """
        a, b, c, d, e = self._coefficients if self.samples else _assumed(typical)
        return size, a + b * size, c + d * size, e * size

    def _assumption(self) -> list[float]:
        """Return the coefficients, if batches cost what they are padded to."""
        shape = _assumed(self.typical)
        scale = _dot(shape, self._sums) / sum(
            value * _dot(shape, row) for value, row in zip(shape, self._products, strict=True)
        )
        return [scale * value for value in shape]

    def _fit(self, features: Sequence[int]) -> None:
        self._coefficients = self._solved(self._assumption(), features, _ASSUMED_WEIGHT)
        by_size = self._solved([0.0] * 5, _BY_SIZE, 0.0)
        unexplained, variance = self._error(self._coefficients), self._error(by_size)
        self.explained = 1.0 - unexplained / variance if variance else 0.0
        self.spread = (variance / self._weight) ** 0.5

    def _solved(self, start: list[float], features: Sequence[int], pull: float) -> list[float]:
        """Return the best coefficients of these features, not negative, by coordinate descent.

        ``pull`` is the weight by which they are drawn towards ``start``.
        """
        found = list(start)
        for _ in range(_SWEEPS):
            for index in features:
                row = self._products[index]
                if not row[index]:
                    continue
                others = _dot(row, found) - row[index] * found[index]
                own = self._sums[index] - others + pull * row[index] * start[index]
                found[index] = max(0.0, own / ((1.0 + pull) * row[index]))
        return found

    def _error(self, coefficients: Sequence[float]) -> float:
        """Return the weighted sum of squared relative errors."""
        error = self._weight
        for coefficient, row, total in zip(coefficients, self._products, self._sums, strict=True):
            error += coefficient * (_dot(row, coefficients) - 2.0 * total)
        return max(0.0, error)


def _assumed(typical: float) -> list[float]:
    return [_ASSUMED_OVERHEAD * (typical or 1.0), 0.0, 0.0, 1.0, 0.0]


def _dot(some: Sequence[float], others: Sequence[float]) -> float:
    return math.fsum(map(mul, some, others))


class CostsByLength:
    """`Costs` of a batch, or a job, whose length was set before.

    The latency model has the costs at the reference length.
    """

    def __init__(self, costs: LatencyModel, lengths: LengthCosts) -> None:
        self._costs = costs
        self._lengths = lengths
        self._reference = 0.0
        self._longest = self._alone = 0.0
        self._most: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether any cost was learnt."""
        return self._costs.is_known

    @property
    def deviation(self) -> float:
        """As `Costs.deviation`, of batches of one size and length."""
        return self._costs.deviation

    def relearn(self) -> None:
        """Make the typical length the reference, and learn the costs at that from the lengths."""
        self._reference = self._lengths.typical
        sizes = [round(point.size) for point in self._costs.points]
        self._costs.relearn((size, self._lengths.seconds(size, self._reference)) for size in sizes)

    def forget(self) -> None:
        """Use lengths no longer."""
        self._reference = 0.0

    def as_reference(self, size: int, longest: float, seconds: float) -> float:
        """Return what a batch of these seconds would have taken at the reference length."""
        return seconds / self._factor(size, longest)

    def use_job(self, length: float) -> None:
        """Return costs of a job of this length from now on, and of batches of typical lengths."""
        self._alone, self._longest, self._most = length, self._lengths.typical, None

    def use_batch(self, size: int, longest: float) -> None:
        """Return costs of a batch of up to this size with this longest item from now on."""
        self._alone = self._longest = longest
        self._most = size

    def mean(self, size: float) -> float:
        """Return the mean seconds of a batch of this size."""
        return self._costs.mean(size) * self._factor(size, self._longest_of(size))

    def bound(self, size: float) -> float:
        """Return a high estimate of its seconds."""
        size = size if self._most is None else min(size, self._most)
        return self._costs.bound(size) * self._factor(size, self._longest_of(size))

    def until_answered(self, size: float) -> float:
        """Return the mean seconds until its answers are sent.

        Of a larger batch than there are jobs of this length, a part of the missing ones count.
        """
        if self._most is not None and size > self._most:
            size = self._most + _MISSING_SHARE * (size - self._most)
        return self._costs.until_answered(size) * self._factor(size, self._longest_of(size))

    def _longest_of(self, size: float) -> float:
        return self._alone if size == 1 else self._longest

    def _factor(self, size: float, longest: float) -> float:
        if not self._reference:
            return 1.0
        rows, seconds = round(size), self._lengths.seconds
        return max(_MIN_FACTOR, seconds(rows, longest) / seconds(rows, self._reference))
