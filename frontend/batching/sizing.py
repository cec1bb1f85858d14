"""The choice of batch sizes, by throughput, latency goal and memory.

knee                 the smallest size with nearly all of the throughput (``batch_size=auto``)
largest_that_pays    the size beyond which throughput falls
MemoryCap            a limit that falls when a device runs out of memory, and rises again
BatchSizing          the smallest of these limits and of those in the settings
CompiledSizes        for models that run at given sizes only
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.latency_model import Costs, LatencyModel, bucket_of
from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.policies import Plan
from marserve.frontend.configuration.model_schema import FIXED, FIXED_OR_SINGLE

# Share of the best throughput that is enough.
_ENOUGH = 0.95
# Larger batches are worse, and not only noisy, if their throughput is below the best by more than
# this share of it, or by this many mean deviations of the costs (they are averaged over about ten
# batches).
_WORSE = 0.03
_WORSE_DEVIATIONS = 0.6
# Below this gain in throughput, batching is not worth the wait.
_MIN_GAIN = 1.1
# A request may have to wait for a batch and then run in one: two of them within the goal (Nexus).
_BATCHES_PER_ANSWER = 2
# The size that traffic must have reached before a size is chosen by it.
_MIN_SIZE_SEEN = 8
# The queue capacity under a latency goal, however long that is; it limits memory. While no cost is
# known, nobody is refused by costs, so it is less: but enough for what comes while first batches
# run, since a request that was refused then would mostly have been answered in time.
_MAX_QUEUE_CAPACITY = 10_000
_QUEUE_CAPACITY_AT_FIRST = 1000
_REGROWTH_SECONDS = 600.0
_REGROWTH = 1.25
_LARGER_THAN_ANY_BATCH = 1 << 31


class Choice(NamedTuple):
    """A batch size, and the reason in a sentence."""

    size: float
    why: str


def knee(sizes: Sequence[float], costs: Costs, goal: float = math.inf) -> Choice:
    """Choose a batch size from one or more rising sizes whose costs are known.

    It is the smallest with 95 % of the best throughput, among those of which two batches fit into
    the goal (seconds from arrival to answer); the smallest of all if batching gains less than 10 %.
    """
    allowed = [size for size in sizes if _BATCHES_PER_ANSWER * costs.bound(size) <= goal]
    if not allowed:
        return Choice(sizes[0], "no two batches fit into the latency goal")
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
    """The largest of rising sizes with nearly the best throughput; infinite if that is the last.

    If a model loses throughput with larger batches, a queue that has grown long would stay long,
    because it is served in exactly those batches.
    """
    throughput = {size: size / costs.mean(size) for size in sizes}
    best = max(throughput.values(), default=0.0)
    pays = [size for size in sizes if throughput[size] >= (1.0 - tolerance) * best]
    return pays[-1] if pays and pays[-1] < sizes[-1] else math.inf


class MemoryCap:
    """The largest batch that fits into memory, as far as known; pure, time is passed in."""

    def __init__(self) -> None:
        self._cap = math.inf
        #: When the cap will be raised to try larger batches; infinite without a cap.
        self.grows_at = math.inf

    def at(self, now: float) -> float:
        """The cap at this moment; it grows by a quarter every ten minutes."""
        while now >= self.grows_at:
            self.grows_at += _REGROWTH_SECONDS
            self._cap = max(self._cap + 1, math.floor(self._cap * _REGROWTH))
            if self._cap > _LARGER_THAN_ANY_BATCH:
                self._cap = self.grows_at = math.inf
        return self._cap

    def exceeded(self, size: int, now: float, fits: int = 1) -> None:
        """Lower the cap: a batch of this size did not fit, and one of ``fits`` did."""
        self._cap = min(self.at(now), max(fits, size // 2))
        self.grows_at = now + _REGROWTH_SECONDS


class BatchSizing:
    """Determines the largest batch that may be formed at a moment.

    Attributes:
        choice: With automatic sizes, the size that was chosen; None before that.
        why: The reason for the limit; empty if it is that of the settings.
        largest: The limit by all but the learnt throughput.
    """

    def __init__(self, costs: LatencyModel) -> None:
        self.why = ""
        self.largest = 1
        #: The share of requests that fail by themselves; while there are any, the size that is the
        #: cheapest with them.
        self.share_failing = 0.0
        self.cheapest = 0
        self._costs = costs
        self._is_profiled = False

    def reconfigure(self, batching: Batching) -> None:
        """Apply new settings; the memory cap is reset, too."""
        self._batching = batching
        self.choice: Choice | None = None
        self.memory = MemoryCap()

    def seed(self, costs: Iterable[tuple[float, float]]) -> None:
        """Learn costs measured before any traffic: pairs of batch size and seconds."""
        self._is_profiled = True
        self._costs.seed(costs)

    @property
    def queue_capacity(self) -> int:
        """The capacity of the queue: as configured, or large where a latency goal limits it."""
        batching = self._batching
        if batching.is_queue_bounded or not batching.max_latency:
            return batching.queue_size
        if not self._costs.is_known:
            return max(batching.queue_size, _QUEUE_CAPACITY_AT_FIRST)
        return _MAX_QUEUE_CAPACITY

    def max_size(self, now: float) -> int:
        """The largest batch at this moment, at least 1; sets `choice` and `why`."""
        batching = self._batching
        if batching.is_automatic:
            self.choice = self._choose()
        unknown = "learning" if batching.is_automatic and self.choice is None else ""
        bounds = [
            (batching.max_size, unknown),
            (self.queue_capacity, unknown),  # a full queue closes a batch: no other job could join
            (self.memory.at(now), "a larger batch needed more memory than there is"),
        ]
        if self.share_failing:
            why = f"{self.share_failing:.0%} of the requests fail: smaller batches cost less"
            bounds.append((self.cheapest, why))
        self.largest = max(1, int(min(bounds, key=itemgetter(0))[0]))
        if self.choice is not None:
            bounds.insert(0, self.choice)
        if batching.keeps_deadlines:
            tolerance = max(_WORSE, _WORSE_DEVIATIONS * self._costs.deviation)
            pays = largest_that_pays(self._known_sizes(), self._costs, tolerance)
            pays = self._largest_like(pays) if pays < math.inf else pays
            bounds.append((pays, "larger batches have less throughput"))
        size, self.why = min(bounds, key=itemgetter(0))
        return max(1, int(size))

    def size_that_pays(self, size: int) -> int | None:
        """The size of the batches that give nearly all of the throughput, now; None if unknown.

        ``size`` is the largest that may be formed now. A fixed policy with a window waits for it,
        whatever pays. Beyond the largest size that was seen, larger ones may pay.
        """
        batching = self._batching
        if batching.is_automatic and self.choice is None:
            return None
        if batching.delay and batching.policy in (FIXED, FIXED_OR_SINGLE):
            return size
        sizes = [each for each in self._known_sizes() if each <= size]
        if not sizes:
            return size
        choice = knee(sizes, self._costs, batching.goal)
        if choice.size == sizes[-1] < size and not batching.max_latency:
            return size
        return min(size, self._largest_like(choice.size))

    def _choose(self) -> Choice | None:
        """Choose the size automatically; None while too little is known.

        As long as the best size is the largest one seen in traffic, there may be a better one.
        """
        batching, sizes = self._batching, self._known_sizes()
        if not sizes or (sizes[0] > 1 and not batching.compiled_sizes):
            return None
        choice = knee(sizes, self._costs, batching.goal)
        is_enough = sizes[-1] >= min(_MIN_SIZE_SEEN, batching.max_size) and choice.size < sizes[-1]
        if not self._is_profiled and not is_enough:
            return None
        return choice._replace(size=self._largest_like(choice.size))

    def _largest_like(self, size: float) -> int:
        """The largest size that is learnt as this one is: smaller ones have come by chance."""
        batching = self._batching
        if batching.compiled_sizes:
            return int(size)
        return min(bucket_of(round(size)), batching.max_size)

    def _known_sizes(self) -> Sequence[float]:
        """The sizes whose cost is known, rising: means of those that were seen."""
        batching, costs = self._batching, self._costs
        return [
            size
            for size in batching.compiled_sizes or [point.size for point in costs.points]
            if size <= batching.max_size and costs.knows(round(size))
        ]


class CompiledSizes:
    """The rising sizes that a model was compiled for; batches are padded or cut to one of them.

    As `Costs`, the cost of a batch is that of the next larger compiled size.
    """

    def __init__(self, sizes: Sequence[int], costs: Costs) -> None:
        self._sizes = self._usable = sizes
        self._costs = costs

    @property
    def is_known(self) -> bool:
        """See `Costs.is_known`."""
        return self._costs.is_known

    def mean(self, size: float) -> float:
        """See `Costs.mean`."""
        return self._costs.mean(_up(self._sizes, size))

    def bound(self, size: float) -> float:
        """See `Costs.bound`."""
        return self._costs.bound(_up(self._sizes, size))

    def chance(self, size: float, seconds: float) -> float:
        """See `Costs.chance`."""
        return self._costs.chance(_up(self._sizes, size), seconds)

    def limit(self, size: int) -> int:
        """Use no sizes above this one from now on; returns the largest batch allowed now."""
        self._usable = self._sizes[: bisect_right(self._sizes, size)] or self._sizes[:1]
        return min(size, self._usable[-1])

    def fit(self, plan: Plan, now: float, queue: JobQueue) -> Plan:
        """Cut a batch to the smaller size if that costs less per request than padding it.

        The rest stays for the next batch. (This is TensorFlow Serving's rule for its allowed sizes;
        padding is calculated by `Batching.run_as`.)
        """
        if plan.reason is Reason.SINGLE or not self.is_known:
            return plan
        up = _up(self._usable, plan.take)
        down = max((size for size in self._usable if size <= plan.take), default=up)
        if down >= plan.take or self.mean(down) / down >= self.mean(up) / plan.take:
            return plan
        both = self.bound(down) + self.bound(_up(self._usable, plan.take - down))
        is_in_time = now + both <= queue.deadline_at(plan.shed + down)
        return plan._replace(take=down) if is_in_time else plan


def _up(sizes: Sequence[int], size: float) -> int:
    """The smallest of the sizes that is large enough, or the last."""
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]
