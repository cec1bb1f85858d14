"""Latencies of requests that both servers answered, one right after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from marserve.tools.bench.measurement import percentile

#: Below, the second slowest of all answers would be called the 99th percentile.
ENOUGH_FOR_P99 = 100
_SLICES = 5
_ENOUGH_FOR_SLICES = 20


@dataclass(frozen=True)
class Ratio:
    """New over old; below 1 the new server is faster.

    Attributes:
        value: Of all pairs.
        spread: The smallest and the largest of five stretches of time; None for too few pairs.
    """

    value: float
    spread: tuple[float, float] | None


@dataclass(frozen=True)
class Latencies:
    """Of pairs, in seconds and in the order in which they were sent: old and new."""

    pairs: Sequence[tuple[float, float]]

    @property
    def medians(self) -> tuple[float, float]:
        """Of both servers."""
        return (median(old for old, _ in self.pairs), median(new for _, new in self.pairs))

    @property
    def p99(self) -> tuple[float, float] | None:
        """Of both servers; None for too few pairs."""
        if len(self.pairs) < ENOUGH_FOR_P99:
            return None
        old, new = (sorted(each[which] for each in self.pairs) for which in (0, 1))
        return percentile(old, 99), percentile(new, 99)

    @property
    def ratio(self) -> Ratio:
        """Of the medians."""
        return Ratio(_of(self.pairs), self._spread())

    def _spread(self) -> tuple[float, float] | None:
        if len(self.pairs) < _ENOUGH_FOR_SLICES:
            return None
        bounds = [len(self.pairs) * number // _SLICES for number in range(_SLICES + 1)]
        ratios = [_of(self.pairs[start:end]) for start, end in pairwise(bounds)]
        return min(ratios), max(ratios)


def _of(pairs: Sequence[tuple[float, float]]) -> float:
    return median(new for _, new in pairs) / median(old for old, _ in pairs)
