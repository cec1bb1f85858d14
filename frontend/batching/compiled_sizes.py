"""Batches of models that were compiled for given sizes: padded, or cut, to one of them."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.learning.costs import Costs
from marserve.frontend.batching.policies import Plan


class CompiledSizes:
    """The rising sizes that a model was compiled for.

    As `Costs`, the cost of a batch is that of the next larger compiled size.
    """

    def __init__(self, sizes: Sequence[int], costs: Costs) -> None:
        self._sizes = sizes
        self._costs = costs

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the costs."""
        return self._costs.is_known

    @property
    def deviation(self) -> float:
        """As `Costs.deviation`."""
        return self._costs.deviation

    def mean(self, size: float) -> float:
        """Return the mean seconds of a batch that is padded to a compiled size."""
        return self._costs.mean(_up(self._sizes, size))

    def bound(self, size: float) -> float:
        """Return a high estimate of the seconds of such a batch."""
        return self._costs.bound(_up(self._sizes, size))

    def until_answered(self, size: float) -> float:
        """Return the mean seconds until the answers of such a batch are sent."""
        return self._costs.until_answered(_up(self._sizes, size))

    def fit(self, plan: Plan, largest: int, now: float, queue: JobQueue) -> Plan:
        """Cut a batch to the smaller size if that costs less per request than padding it.

        This is TensorFlow Serving's rule. No size above ``largest`` is used, except the smallest.
        """
        if plan.take in self._sizes or plan.reason is Reason.SINGLE or not self.is_known:
            return plan
        usable = up_to(self._sizes, largest)
        up = _up(usable, plan.take)
        down = max((size for size in usable if size <= plan.take), default=up)
        if down >= plan.take or self.mean(down) / down >= self.mean(up) / plan.take:
            return plan
        both = self.bound(down) + self.bound(_up(usable, plan.take - down))
        is_in_time = now + both <= queue.deadline_at(plan.shed + down)
        return plan._replace(take=down) if is_in_time else plan


def up_to(sizes: Sequence[int], largest: int) -> Sequence[int]:
    """Return those of rising sizes that are not above ``largest``; the first if all are."""
    return sizes[: bisect_right(sizes, largest)] or sizes[:1]


def _up(sizes: Sequence[int], size: float) -> int:
    """Return the smallest of the sizes that is large enough, or the last."""
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]
