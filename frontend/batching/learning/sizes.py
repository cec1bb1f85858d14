"""Batch sizes by throughput, latency goal and memory."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from marserve.frontend.batching.learning.costs import Costs

# The share of the best throughput that is enough.
_ENOUGH = 0.95
# Below this gain in throughput, batching is not worth the wait.
_MIN_GAIN = 1.1
# A request may have to wait for a batch and then run in one: two of them within the goal (Nexus);
# if no two fit, one.
_BATCHES_PER_ANSWER = 2, 1
_REGROWTH_SECONDS = 600.0
_REGROWTH = 1.25
_LARGER_THAN_ANY_BATCH = 1 << 31


class Choice(NamedTuple):
    """A batch size, and the reason in a sentence."""

    size: float
    why: str


def knee(sizes: Sequence[float], costs: Costs, goal: float = math.inf) -> Choice:
    """Choose the smallest size with 95 % of the best throughput; ``sizes`` rise, with known costs.

    Only sizes count of which two batches fit into the goal (seconds from arrival to answer), or one
    if no two do; their mean counts, because slow batches of small sizes say little of large ones.
    If batching gains less than 10 %, it is the smallest of all. If no batch fits into the goal, all
    sizes count: small batches would only make more requests late.
    """
    fitting = (
        [size for size in sizes if batches * costs.mean(size) <= goal]
        for batches in _BATCHES_PER_ANSWER
    )
    allowed = next(filter(None, fitting), sizes)
    throughput = {size: size / costs.mean(size) for size in allowed}
    best = max(throughput.values())
    size = next(size for size in allowed if throughput[size] >= _ENOUGH * best)
    gain = throughput[size] / throughput[allowed[0]]
    if gain < _MIN_GAIN:
        why = f"batching does not pay: the best size gains {gain - 1:.0%} throughput"
        return Choice(sizes[0], why)
    limit = " within the latency goal" if len(allowed) < len(sizes) else ""
    return Choice(size, f"{gain:.2g} times the throughput of size {allowed[0]:.0f}{limit}")


def largest_that_pays(sizes: Sequence[float], costs: Costs, tolerance: float) -> float:
    """Return the largest of rising sizes with nearly the best throughput; infinite for the last.

    A queue that has grown long is served in the largest batches. If these have less throughput than
    smaller ones, it stays long.
    """
    throughput = {size: size / costs.mean(size) for size in sizes}
    best = max(throughput.values(), default=0.0)
    pays = [size for size in sizes if throughput[size] >= (1.0 - tolerance) * best]
    return pays[-1] if pays and pays[-1] < sizes[-1] else math.inf


class SizeCap:
    """The largest batch that memory or the model allows, until it grows; times are passed in.

    ``why`` is the reason in a sentence.
    """

    def __init__(self) -> None:
        self.why = ""
        self._cap = math.inf
        self.grows_at = math.inf

    def at(self, now: float) -> float:
        """Return the cap at this moment; it grows by a quarter every ten minutes."""
        while now >= self.grows_at:
            self.grows_at += _REGROWTH_SECONDS
            self._cap = max(self._cap + 1, math.floor(self._cap * _REGROWTH))
            if self._cap > _LARGER_THAN_ANY_BATCH:
                self._cap = self.grows_at = math.inf
        return self._cap

    def exceeded(self, size: int, now: float, why: str, fits: int = 1) -> None:
        """Lower the cap: a batch of ``size`` failed, and one of ``fits`` succeeded."""
        self._cap = min(self.at(now), max(fits, size // 2))
        self.grows_at = now + _REGROWTH_SECONDS
        self.why = why
