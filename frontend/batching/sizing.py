"""Sizes of batches: the one that is worth it, those a model was compiled for, the one that fits.

knee                 the smallest that has nearly all of the throughput (``batch_size=auto``)
largest_that_pays    beyond it batches only become slower
CompiledSizes        a policy whose batches are padded up or cut down to given sizes (Neuron)
MemoryCap            a bound that falls when a device runs out of memory, and rises again
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.jobs import Priority
from marserve.frontend.batching.latency_model import Costs
from marserve.frontend.batching.policies import BatchPolicy, Crew, Line, Plan

# Share of the best throughput that is enough.
_ENOUGH = 0.95
# Larger batches whose throughput is below this share of the best are worse, and not only noisy.
_STILL_PAYS = 0.9
# Below this gain in throughput, batching is not worth the wait.
_LEAST_GAIN = 1.1
# A request may have to wait for a batch and then run in one: two of them within the goal (Nexus).
_BATCHES_PER_ANSWER = 2
_REGROWTH_SECONDS = 600.0
_REGROWTH = 1.25


class Choice(NamedTuple):
    """A size, and one sentence why."""

    size: int
    why: str


def knee(sizes: Sequence[int], costs: Costs, goal: float = math.inf) -> Choice:
    """Chooses the size of batches.

    Args:
        sizes: Those whose cost is known, rising, at least one.
        costs: What they cost.
        goal: Seconds from arrival to answer; infinite for none.

    Returns:
        The smallest size with 95 % of the best throughput, among those of which two fit into the
        goal; the smallest of all where batching gains less than a tenth.
    """
    allowed = [one for one in sizes if _BATCHES_PER_ANSWER * costs.bound(one) <= goal]
    if not allowed:
        return Choice(sizes[0], "no two batches fit into the latency goal")
    throughput = {one: one / costs.mean(one) for one in allowed}
    best = max(throughput.values())
    size = next(one for one in allowed if throughput[one] >= _ENOUGH * best)
    gain = throughput[size] / throughput[allowed[0]]
    if gain < _LEAST_GAIN:
        why = f"batching does not pay: the best size gains {gain - 1:.0%} throughput"
        return Choice(sizes[0], why)
    limit = " within the latency goal" if len(allowed) < len(sizes) else ""
    return Choice(size, f"{gain:.2g} times the throughput of size {allowed[0]}{limit}")


def largest_that_pays(sizes: Sequence[int], costs: Costs) -> float:
    """The size beyond which batches only become slower.

    Some models do: what a large batch needs no longer fits into a cache. A queue that once grew
    long would then stay long, for it is worked off in the very batches that are slow.

    Args:
        sizes: Those whose cost is known, rising.
        costs: What they cost.

    Returns:
        The largest size with nine tenths of the best throughput; infinite where that is the last.
    """
    throughput = [one / costs.mean(one) for one in sizes]
    pays = [one >= _STILL_PAYS * max(throughput) for one in throughput]
    if not pays or pays[-1]:
        return math.inf
    return max(one for one, does in zip(sizes, pays, strict=True) if does)


class CompiledCosts:
    """Costs of a model that runs given sizes only: those of the next one up.

    Args:
        costs: As they were learnt.
        sizes: Rising.
    """

    def __init__(self, costs: Costs, sizes: Sequence[int]) -> None:
        self._costs = costs
        self._sizes = sizes

    @property
    def is_known(self) -> bool:
        """See `Costs.is_known`."""
        return self._costs.is_known

    def mean(self, size: int) -> float:
        """See `Costs.mean`."""
        return self._costs.mean(_up(self._sizes, size))

    def bound(self, size: int) -> float:
        """See `Costs.bound`."""
        return self._costs.bound(_up(self._sizes, size))


@dataclass
class CompiledSizes:
    """A policy whose batches run as one of the sizes that a model was compiled for.

    A batch between two of them is left to be padded up (`options.Batching.run_as`), or cut down and
    the rest left for the next batch, whichever costs less per request (TensorFlow Serving's rule
    for its allowed sizes).

    Args:
        policy: Decides how many may leave.
        sizes: Rising, the last is the policy's size.
        costs: What they cost.
    """

    policy: BatchPolicy
    sizes: Sequence[int]
    costs: Costs

    def __post_init__(self) -> None:
        self._usable = self.sizes

    @property
    def size(self) -> int:
        """See `BatchPolicy`."""
        return self.policy.size

    @size.setter
    def size(self, size: int) -> None:
        self._usable = [one for one in self.sizes if one <= size] or self.sizes[:1]
        self.policy.size = min(size, self._usable[-1])

    def order(self, arrived: float, deadline: float, priority: Priority) -> float:
        """See `BatchPolicy.order`."""
        return self.policy.order(arrived, deadline, priority)

    def refuses(
        self, now: float, order: float, deadline: float, line: Line, crew: Crew
    ) -> float | None:
        """See `BatchPolicy.refuses`."""
        return self.policy.refuses(now, order, deadline, line, crew)

    def arrived(self, now: float) -> None:
        """See `BatchPolicy.arrived`."""
        self.policy.arrived(now)

    def answered(self, now: float, jobs: int) -> None:
        """See `BatchPolicy.answered`."""
        self.policy.answered(now, jobs)

    def plan(self, now: float, line: Line, crew: Crew) -> Plan:
        """See `BatchPolicy.plan`."""
        plan = self.policy.plan(now, line, crew)
        if not plan.take:
            return plan
        up = _up(self._usable, plan.take)
        down = max((one for one in self._usable if one <= plan.take), default=up)
        if down < plan.take and plan.reason is not Reason.SINGLE:
            latest = line.deadline_at(plan.shed + down) - now
            if self._cutting_pays(down, up, plan.take, latest):
                return plan._replace(take=down)
        return plan

    def _cutting_pays(self, down: int, up: int, take: int, latest: float) -> bool:
        """Whether a smaller batch now and the rest later is better than padding.

        Args:
            down: The next smaller size.
            up: The next larger one.
            take: Requests there are.
            latest: Seconds until the first of those left behind has to be answered.
        """
        mean, bound = self.costs.mean, self.costs.bound
        if not self.costs.is_known:
            return False
        is_cheaper = mean(down) / down < mean(up) / take
        return is_cheaper and bound(down) + bound(_up(self._usable, take - down)) <= latest


class MemoryCap:
    """The largest batch that fits into memory, as far as is known; pure, time is passed in."""

    def __init__(self) -> None:
        self._cap = math.inf
        self._since = 0.0

    def at(self, now: float) -> float:
        """The cap at this moment; it grows again by a quarter every ten minutes."""
        if self._cap < math.inf and now - self._since >= _REGROWTH_SECONDS:
            self._since = now
            self._cap = max(self._cap + 1, math.floor(self._cap * _REGROWTH))
        return self._cap

    def exceeded(self, size: int, now: float, fits: int = 1) -> None:
        """A batch of this size did not fit, and one of ``fits`` did."""
        self._cap = min(self._cap, max(fits, size // 2))
        self._since = now


def _up(sizes: Sequence[int], size: int) -> int:
    """The smallest of the sizes that holds so many; the last where none does."""
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]
