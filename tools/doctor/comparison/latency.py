"""Latencies of requests that both servers answered, one directly after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from marserve.tools.bench.measurement import percentile

#: With fewer values, the 99th percentile is the slowest one.
ENOUGH_FOR_P99 = 100
_SLICES = 5
_ENOUGH_FOR_SLICES = 20


@dataclass(frozen=True)
class Ratio:
    """New latency divided by old; below 1 the new server is faster.

    Attributes:
        value: Ratio of the medians of all pairs.
        spread: Smallest and largest ratio of five periods; None for too few pairs.
    """

    value: float
    spread: tuple[float, float] | None


@dataclass(frozen=True)
class Latencies:
    """Pairs of old and new latency in seconds, in the order of sending."""

    pairs: Sequence[tuple[float, float]]

    @property
    def medians(self) -> tuple[float, float]:
        """The medians of both servers."""
        return (median(old for old, _ in self.pairs), median(new for _, new in self.pairs))

    @property
    def p99(self) -> tuple[float, float] | None:
        """The 99th percentiles of both servers; None for too few pairs."""
        if len(self.pairs) < ENOUGH_FOR_P99:
            return None
        old, new = (sorted(each[which] for each in self.pairs) for which in (0, 1))
        return percentile(old, 99), percentile(new, 99)

    @property
    def ratio(self) -> Ratio:
        """The ratio of the medians."""
        return Ratio(_of(self.pairs), self._spread())

    def _spread(self) -> tuple[float, float] | None:
        if len(self.pairs) < _ENOUGH_FOR_SLICES:
            return None
        bounds = [len(self.pairs) * number // _SLICES for number in range(_SLICES + 1)]
        ratios = [_of(self.pairs[start:end]) for start, end in pairwise(bounds)]
        return min(ratios), max(ratios)


def _of(pairs: Sequence[tuple[float, float]]) -> float:
    return median(new for _, new in pairs) / median(old for old, _ in pairs)
