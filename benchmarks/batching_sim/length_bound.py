"""What batches by length can reach: requests in time, and how many of the longest tenth.

Arrivals are even and costs are known. The requests of a range of lengths that arrive within T
seconds leave as one batch, which takes c seconds; the oldest is in time if T + c is at most the
goal. So a range takes the share c / T of the worker. A linear program chooses the ranges and the
share of the time of each. It only keeps the sum of the shares within the worker's time: batches
never wait for each other. A batch could also leave out requests of its range, and
uneven arrivals have better moments: this is not a strict bound. The policies stay 4 to 7 points
below it.

Without a further condition the best schedule for both numbers refuses requests a little shorter
than the longest tenth. With ``is_fair`` no length is served more often than a shorter one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.special import ndtri

if TYPE_CHECKING:
    from by_length import Lengths

Values = NDArray[np.float64]

_TENTH = 0.9
#: Ranges of lengths are between these quantiles.
_QUANTILES = np.concatenate(
    [np.linspace(0.0, _TENTH, 37)[:-1], np.linspace(_TENTH, 0.998, 21), [0.99999]]
)
# The longest of a batch is averaged over these quantiles of it.
_POINTS = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
_HALVINGS = 30
_ALL_TIME = 1.0


def curve(
    model: "Lengths", load: float, least: Sequence[float], *, is_fair: bool = True
) -> list[tuple[float, float]]:
    """The most requests in time, and the share of the longest tenth: at least each of ``least``.

    A share that cannot be reached is left out.
    """
    starts, ends, shares = _ranges(model, load)
    weights = np.diff(_QUANTILES)
    rows = np.arange(len(weights))[:, np.newaxis]
    served = ((starts <= rows) & (rows < ends)).astype(float)  # by range, of each length
    longest = weights * (_QUANTILES[:-1] >= _TENTH) / (1.0 - _TENTH) @ served
    limits = [shares[np.newaxis], served, -longest[np.newaxis]]
    values = [np.array([_ALL_TIME]), np.ones(len(weights)), np.zeros(1)]
    if is_fair:
        limits.insert(0, served[1:] - served[:-1])
        values.insert(0, np.zeros(len(weights) - 1))
    bounds, highest = np.vstack(limits), np.concatenate(values)
    points = []
    for share in least:
        highest[-1] = -share
        found = linprog(-(weights @ served), A_ub=bounds, b_ub=highest, method="highs")
        if found.status == 0:
            points.append((float(-found.fun), float(longest @ found.x)))
    return points


def _ranges(model: "Lengths", load: float) -> tuple[Values, Values, Values]:
    """The first and last quantile of each range, and the share of the worker that it takes."""
    profile, count = model.profile, len(_QUANTILES)
    starts, ends = np.triu_indices(count, 1)
    low, high = _QUANTILES[starts], _QUANTILES[ends]
    rate = load * profile.capacity() * (high - low)

    def seconds(size: Values) -> Values:
        """Of a batch of this size, or of one."""
        size = np.maximum(size, 1.0)
        points = _POINTS[:, np.newaxis] ** (1.0 / size)
        longest = np.exp(model.sigma * (ndtri(low + (high - low) * points) - model.sigma / 2))
        return np.asarray(model.seconds(size, longest).mean(axis=0))

    shortest, longest = np.zeros(len(rate)), np.full(len(rate), profile.goal)
    for _ in range(_HALVINGS):
        middle = (shortest + longest) / 2
        fits = (rate * middle <= profile.size) & (middle + seconds(rate * middle) <= profile.goal)
        shortest, longest = np.where(fits, middle, shortest), np.where(fits, longest, middle)
    possible = shortest > 0.0
    shortest = np.maximum(shortest, np.finfo(float).tiny)
    size = rate * shortest
    shares = np.where(size < 1.0, rate * seconds(size), seconds(size) / shortest)
    possible &= shares <= _ALL_TIME
    return starts[possible], ends[possible], shares[possible]
