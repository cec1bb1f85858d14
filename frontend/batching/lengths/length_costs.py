"""The cost of a batch by its size and the length of its longest item.

Where inputs differ in length, shorter ones are padded to the longest of their batch, so that this
one decides what all of them cost. The cost is learnt as

    seconds = a + b·n + c·x + d·n·x + e·n·x²        n items, the longest of length x

by least squares of relative errors, with weights that fade, and no coefficient negative: a batch
never costs less for being longer. ``d`` is the padded work of most layers, ``e`` that of attention,
and ``c`` the steps of recurrent or autoregressive models.

The speed of the machine is left to the latency model: `CostsByLength` takes from here only by how
much a length makes a batch of some size cheaper or more expensive than the reference length does.
"""

import math
from collections.abc import Sequence
from operator import mul

from marserve.frontend.batching.learning.latency_model import LatencyModel

# A sample's weight fades by this with each later one: about the last 200 batches count.
_FADING = 1 - 1 / 200
# Before so many batches have run, a batch is taken to cost as much as the items it is padded to and
# some more of typical length; only how much that is, is learnt.
_MIN_SAMPLES = 16
_ASSUMED_OVERHEAD = 4.0
# How much that counts later, by what the batches tell of the same: nearly nothing, but for what
# they do not tell. If all have run alone, nobody knows what two would cost.
_ASSUMED_WEIGHT = 0.01
# The coefficients are calculated again after this many batches, at first and later.
_FIT_SAMPLES, _LATER_FIT_SAMPLES = 4, 16
_MANY_SAMPLES = 100
_SWEEPS = 60
_BY_SIZE = (0, 1)
_BY_LENGTH = (0, 1, 2, 3, 4)
_TYPICAL_STEP = 0.05
# What an empty item costs, by that of typical length, at least.
_MIN_FACTOR = 0.001

#: Seconds of a batch of ``size`` whose longest item has length x: ``p + q·x + r·x²``.
Row = tuple[int, float, float, float]


class LengthCosts:
    """What batches cost by size and longest item, as far as learnt.

    Attributes:
        samples: Number of batches that were learnt from.
        typical: The length of the longest item, averaged over the last batches.
        explained: The share of the cost's variance between batches of one size that lengths
            explain, 0 to 1.
        spread: That variance, as a relative standard deviation.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.samples = 0
        self.typical = 0.0
        self.explained = self.spread = 0.0
        self._coefficients = [0.0] * 5
        # The sums of the least squares: products of features, and of features and 1.
        self._products = [[0.0] * 5 for _ in range(5)]
        self._sums = [0.0] * 5
        self._weight = 0.0

    @property
    def is_known(self) -> bool:
        """Whether enough batches were seen to tell whether lengths matter."""
        return self.samples >= _MIN_SAMPLES

    def observe(self, size: int, longest: float, seconds: float) -> bool:
        """Learn from a batch; returns whether the coefficients have changed."""
        self.samples += 1
        self.typical += max(_TYPICAL_STEP, 1 / self.samples) * (longest - self.typical)
        # Divided by the seconds, so that errors are relative: the target is always 1.
        each = 1.0 / seconds
        features = [
            each,
            each * size,
            each * longest,
            each * size * longest,
            each * size * longest * longest,
        ]
        for place, feature in enumerate(features):
            self._sums[place] = self._sums[place] * _FADING + feature
            row = self._products[place]
            for other, value in enumerate(features):
                row[other] = row[other] * _FADING + feature * value
        self._weight = self._weight * _FADING + 1.0
        if not self.is_known:
            self._coefficients = self._assumption()
            return True
        pause = _FIT_SAMPLES if self.samples < _MANY_SAMPLES else _LATER_FIT_SAMPLES
        if self.samples % pause:
            return False
        self._fit()
        return True

    def seconds(self, size: int, longest: float) -> float:
        """The mean cost of a batch; 0 while nothing is known."""
        _, p, q, r = self.row(size)
        return p + q * longest + r * longest * longest

    def row(self, size: int, typical: float = 0.0) -> Row:
        """The cost of batches of a size by length.

        Before the first batch has run, only the proportions are right, if ``typical`` is.
        """
        a, b, c, d, e = self._coefficients if self.samples else _assumed(typical)
        return size, a + b * size, c + d * size, e * size

    def _assumption(self) -> list[float]:
        """The coefficients, if batches cost what they are padded to."""
        shape = _assumed(self.typical)
        scale = _dot(shape, self._sums) / sum(
            value * _dot(shape, row) for value, row in zip(shape, self._products, strict=True)
        )
        return [scale * value for value in shape]

    def _fit(self) -> None:
        by_size = self._solved([0.0] * 5, _BY_SIZE, 0.0)
        self._coefficients = self._solved(self._assumption(), _BY_LENGTH, _ASSUMED_WEIGHT)
        unexplained, variance = self._error(self._coefficients), self._error(by_size)
        self.explained = 1.0 - unexplained / variance if variance else 0.0
        self.spread = (variance / self._weight) ** 0.5

    def _solved(self, start: list[float], features: Sequence[int], pull: float) -> list[float]:
        """The best coefficients of these features that are not negative, by coordinate descent.

        They are pulled towards those at the start, so much that what the batches do not tell stays.
        """
        found = list(start)
        for _ in range(_SWEEPS):
            for place in features:
                row = self._products[place]
                if not row[place]:
                    continue
                others = _dot(row, found) - row[place] * found[place]
                own = self._sums[place] - others + pull * row[place] * start[place]
                found[place] = max(0.0, own / ((1.0 + pull) * row[place]))
        return found

    def _error(self, coefficients: Sequence[float]) -> float:
        """The weighted sum of squared relative errors."""
        error = self._weight
        for coefficient, row, total in zip(coefficients, self._products, self._sums, strict=True):
            error += coefficient * (_dot(row, coefficients) - 2.0 * total)
        return max(0.0, error)


def _assumed(typical: float) -> list[float]:
    return [_ASSUMED_OVERHEAD * (typical or 1.0), 0.0, 0.0, 1.0, 0.0]


def _dot(some: Sequence[float], others: Sequence[float]) -> float:
    return math.fsum(map(mul, some, others))


class CostsByLength:
    """`Costs` of batches whose lengths are told before: those of a batch, or of one job.

    The latency model behind it knows what batches of the reference length cost.
    """

    def __init__(self, costs: LatencyModel, lengths: LengthCosts) -> None:
        self._costs = costs
        self._lengths = lengths
        self._reference = 0.0
        self._longest = self._alone = 0.0
        self._most: int | None = None

    @property
    def is_known(self) -> bool:
        """See `Costs.is_known`."""
        return self._costs.is_known

    def relearn(self) -> None:
        """Make the typical length the reference, and take the costs of that from the lengths."""
        self._reference = self._lengths.typical
        sizes = [round(point.size) for point in self._costs.points]
        self._costs.relearn((size, self._lengths.seconds(size, self._reference)) for size in sizes)

    def forget(self) -> None:
        """Lengths have no influence from now on."""
        self._reference = 0.0

    def as_reference(self, size: int, longest: float, seconds: float) -> float:
        """What a batch that took so long would have taken with the reference length."""
        return seconds / self._factor(size, longest)

    def ask_about_job(self, length: float) -> None:
        """Be asked about a job of this length, and about other batches of typical ones."""
        self._alone, self._longest, self._most = length, self._lengths.typical, None

    def ask_about_batch(self, size: int, longest: float) -> None:
        """Be asked about a batch of up to this size, and with this longest item."""
        self._alone = self._longest = longest
        self._most = size

    def mean(self, size: float) -> float:
        """See `Costs.mean`."""
        longest = self._alone if size == 1 else self._longest
        return self._costs.mean(size) * self._factor(size, longest)

    def bound(self, size: float) -> float:
        """See `Costs.bound`."""
        size = size if self._most is None else min(size, self._most)
        longest = self._alone if size == 1 else self._longest
        return self._costs.bound(size) * self._factor(size, longest)

    def chance(self, size: float, seconds: float) -> float:
        """See `Costs.chance`."""
        longest = self._alone if size == 1 else self._longest
        return self._costs.chance(size, seconds / self._factor(size, longest))

    def _factor(self, size: float, longest: float) -> float:
        if not self._reference:
            return 1.0
        rows, seconds = round(size), self._lengths.seconds
        return max(_MIN_FACTOR, seconds(rows, longest) / seconds(rows, self._reference))
