"""What one model version learns from the batches that ran, and the batch sizes that follow from it.

The largest batch is the smallest of several limits: the settings, the capacity of the queue, the
memory of the device, the share of failing requests, and what throughput and latency goal allow.
"""

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter

from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.compiled_sizes import up_to
from marserve.frontend.batching.isolation.failure_isolation import FailureIsolation
from marserve.frontend.batching.learning.buckets import bucket_of
from marserve.frontend.batching.learning.costs import MIN_SECONDS
from marserve.frontend.batching.learning.exploration import Exploration
from marserve.frontend.batching.learning.latency_model import LatencyModel
from marserve.frontend.batching.learning.sizes import Choice, SizeCap, knee, largest_that_pays
from marserve.frontend.batching.lengths.length_grouping import LengthGrouping
from marserve.frontend.batching.options import Batching
from marserve.frontend.configuration.model_schema import FIXED, FIXED_OR_SINGLE, UNSORTED

# Costs are learnt from at most one batch in this time: learning from each of many short batches
# would take longer than running them.
_LEARNING_SECONDS = 0.002
# Sizes are determined again after the first batch, and then after this many.
_BATCHES_LOOKED_AT = 100
# Sizes are determined again when the share of failing requests, or the cost of the largest batch,
# has changed by this factor. Sizes first seen on a machine that has become slower seem to have less
# throughput, until the others are known to be slower, too.
_CHANGED = 1.2
# Larger batches are worse, and not only noisy, if their throughput is below the best by more than
# this share of it, or by this many mean deviations of the costs (they are averaged over about ten
# batches).
_WORSE = 0.03
_WORSE_DEVIATIONS = 0.6
# The size that traffic must have reached before a size is chosen by it.
_MIN_SIZE_SEEN = 8
# The queue capacity under a latency goal, however long that is; it limits memory. It is less while
# no cost is known and none is refused by it, but enough for what comes while the first batches run:
# most of these requests can still be answered in time.
_MAX_QUEUE_CAPACITY = 10_000
_QUEUE_CAPACITY_AT_FIRST = 1000


class Learning:
    """Learns costs, and determines the largest batch by them; the workers' batchers share it."""

    def __init__(self, isolation: FailureIsolation) -> None:
        self.costs = LatencyModel()
        self.exploration = Exploration(self.costs)
        self.lengths: LengthGrouping | None = None  # only if the settings ask for it
        self.learnt_at = -math.inf
        #: The largest batch that may be formed now; the same without the limits by throughput.
        self.size = self.largest = 1
        self.choice: Choice | None = None  # the automatic size, once it is chosen
        self.why = ""  # the reason for the largest size; empty if it is that of the settings
        #: Why a size that the server chooses stays 1; empty if batches change no answers.
        self.distrusted = ""
        self._isolation = isolation
        self._is_profiled = False

    def reconfigure(self, batching: Batching) -> None:
        """Apply new settings; the cap is reset, too."""
        self._batching = batching
        self.choice = None
        self._seconds = 0.0  # the cost of the largest batch when it was determined
        self.cap = SizeCap()
        self._share_failing = 0.0
        if batching.bucket_by == UNSORTED:
            self.lengths = None
        else:
            self.lengths = self.lengths or LengthGrouping(self.costs)
            self.lengths.reconfigure(batching)
        self.exploration.reconfigure(batching)

    @property
    def active_lengths(self) -> LengthGrouping | None:
        """`lengths`, while batches are formed by them."""
        lengths = self.lengths
        return lengths if lengths is not None and lengths.is_active else None

    # -- learning ----------------------------------------------------------------------------------

    def seed(self, costs: Iterable[tuple[float, float]], *, is_complete: bool) -> None:
        """Learn measured costs: pairs of batch size and seconds.

        If they are complete, a size is chosen by them alone, before any traffic.
        """
        self._is_profiled = self._is_profiled or is_complete
        self.costs.seed(costs)

    def observe(self, batch: Batch, seconds: float, now: float) -> bool:
        """Learn from a batch of predictions that succeeded.

        Return whether `max_size` or `active_lengths` may have changed.
        """
        # Not by when batches began: of several workers' batches only the fast ones would count.
        if now < self.learnt_at + _LEARNING_SECONDS:
            return False
        self.learnt_at = now
        seconds = max(seconds, MIN_SECONDS)
        lengths, is_changed = self.lengths, False
        if lengths is not None:
            was_active = lengths.is_active
            seconds = lengths.learn(batch, seconds)
            is_changed = lengths.is_active is not was_active
        self.costs.observe(batch.run_as, seconds)
        is_settled = self.exploration.learn(batch, seconds, self.size, self.largest)
        samples = self.costs.samples
        is_changed |= _differs(self.costs.mean(self.size), self._seconds)
        return is_changed or is_settled or samples == 1 or not samples % _BATCHES_LOOKED_AT

    def failures_changed(self) -> bool:
        """Use the present share of failing requests; return whether it differs from that in use."""
        rate = self._isolation.rate
        share = 0.0 if rate.fails_for_all or not self.costs.is_known else rate.share
        is_changed = _differs(share, self._share_failing)
        if is_changed:
            self._share_failing = share
        return is_changed

    # -- sizes -------------------------------------------------------------------------------------

    @property
    def queue_capacity(self) -> int:
        """The capacity of the queue: as configured, or large where a latency goal limits it."""
        batching = self._batching
        if not batching.goal_bounds_queue:
            return batching.queue_size
        if not self.costs.is_known:
            return max(batching.queue_size, _QUEUE_CAPACITY_AT_FIRST)
        return _MAX_QUEUE_CAPACITY

    def max_size(self, now: float) -> int:
        """Determine the largest batch at this moment, at least 1."""
        batching, compiled = self._batching, self._batching.compiled_sizes
        if batching.is_automatic:
            self.choice = self._choose()
        unknown = "learning" if batching.is_automatic and self.choice is None else ""
        limits = [
            (self.cap.at(now), self.cap.why),
            (batching.max_size, unknown),
            (self.queue_capacity, unknown),  # a full queue closes a batch: no other job could join
        ]
        if share := self._share_failing:
            cheapest = self._isolation.cheapest_size(batching, self.costs, share)
            limits.append(
                (cheapest, f"{share:.0%} of the requests fail: smaller batches cost less")
            )
        if batching.is_automatic and self.distrusted:
            limits.append((1, self.distrusted))
        self.largest = max(1, int(min(limits, key=itemgetter(0))[0]))
        self.exploration.limit(self.largest)
        if self.choice is not None:
            limits.insert(1, self.choice)
        if batching.keeps_deadlines:
            limits.append((self._largest_that_pays(), "larger batches have less throughput"))
        size, self.why = min(limits, key=itemgetter(0))
        self.size = max(1, int(size))
        if compiled:
            self.size = min(self.size, up_to(compiled, self.size)[-1])
        self._seconds = self.costs.mean(self.size)
        return self.size

    @property
    def size_that_pays(self) -> int | None:
        """The size of the batches that give nearly all of the throughput, now; None if unknown.

        A fixed policy with a window waits for full batches. Beyond the largest size that was seen,
        larger ones may pay.
        """
        batching, size = self._batching, self.size
        if batching.is_automatic and self.choice is None:
            return None
        if batching.delay and batching.policy in (FIXED, FIXED_OR_SINGLE):
            return size
        sizes = [each for each in self._known_sizes() if each <= size]
        if not sizes:
            return size
        choice = knee(sizes, self.costs, batching.goal)
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
        choice = knee(sizes, self.costs, batching.goal)
        if len(sizes) == 1 < batching.max_size:
            choice = choice._replace(why="no larger batch was measured")
        is_enough = sizes[-1] >= min(_MIN_SIZE_SEEN, batching.max_size) and choice.size < sizes[-1]
        is_profiled = self._is_profiled and self.costs.is_even
        if not is_profiled and not is_enough:
            return None
        return choice._replace(size=self._largest_like(choice.size))

    def _largest_that_pays(self) -> float:
        tolerance = max(_WORSE, _WORSE_DEVIATIONS * self.costs.deviation)
        pays = largest_that_pays(self._known_sizes(), self.costs, tolerance)
        return self._largest_like(pays) if pays < math.inf else pays

    def _largest_like(self, size: float) -> int:
        """Return the largest size whose cost is learnt with that of this one."""
        if self._batching.compiled_sizes:
            return int(size)
        return min(bucket_of(round(size)), self._batching.max_size)

    def _known_sizes(self) -> Sequence[float]:
        """Return the sizes whose cost is known, rising; of buckets their mean size.

        An automatic size is not chosen by costs that were measured without traffic, unless these
        hold in it: on a machine with other work they do not, and the sizes that look best are
        those that happened to be measured in its pauses.
        """
        batching, costs = self._batching, self.costs
        is_measured = costs.is_even or not batching.is_automatic
        knows = costs.knows if is_measured else costs.knows_by_traffic
        return [
            size
            for size in batching.compiled_sizes or [point.size for point in costs.points]
            if size <= batching.max_size and knows(round(size))
        ]


def _differs(value: float, before: float) -> bool:
    low, high = sorted((value, before))
    return high > _CHANGED * low
