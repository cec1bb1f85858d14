"""Batches of a model that runs given sizes only: padded up to one of them, or cut down (Neuron)."""

from bisect import bisect_left
from collections.abc import Sequence

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.latency_model import Costs
from marserve.frontend.batching.policies import Plan


class CompiledSizes:
    """The sizes that a model was compiled for; as `Costs`, a batch costs what the next one up does.

    Args:
        sizes: Rising, at least one.
        costs: What they cost, as learnt.
    """

    def __init__(self, sizes: Sequence[int], costs: Costs) -> None:
        self._sizes = self._usable = sizes
        self._costs = costs

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

    def limit(self, size: int) -> int:
        """Use no sizes above this one from now on; returns the largest batch that leaves."""
        self._usable = [one for one in self._sizes if one <= size] or self._sizes[:1]
        return min(size, self._usable[-1])

    def fit(self, plan: Plan, now: float, queue: JobQueue) -> Plan:
        """Cut a batch between two sizes down where that costs less per request than padding it up.

        The rest is left for the next batch. (TensorFlow Serving's rule for its allowed sizes; what
        is padded up is for `Batching.run_as` to say.)
        """
        if plan.reason is Reason.SINGLE or not self.is_known:
            return plan
        up = _up(self._usable, plan.take)
        down = max((size for size in self._usable if size <= plan.take), default=up)
        if down >= plan.take or self.mean(down) / down >= self.mean(up) / plan.take:
            return plan
        both = self.bound(down) + self.bound(_up(self._usable, plan.take - down))
        return (
            plan._replace(take=down) if now + both <= queue.deadline_at(plan.shed + down) else plan
        )


def _up(sizes: Sequence[int], size: int) -> int:
    """The smallest of the sizes that holds so many; the last where none does."""
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]
