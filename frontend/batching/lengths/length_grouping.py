"""Batches by length (``batch_bucket_by``): which jobs share a batch where inputs differ in length.

The policy decides when a batch leaves and how large it may be. The most urgent queued jobs are cut
into batches of similar lengths that cost the least together, and the batch with the most urgent job
leaves. So no job starves.

With ``length`` that is done until costs show that lengths do not matter; with ``auto`` while costs
show that they do.
"""

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from statistics import fmean

from marserve.backend.input_lengths import FAILED, is_length
from marserve.backend.protocol import Input
from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Job
from marserve.frontend.batching.learning.latency_model import LatencyModel
from marserve.frontend.batching.lengths.input_length import length_of
from marserve.frontend.batching.lengths.length_costs import CostsByLength, LengthCosts, Row
from marserve.frontend.batching.lengths.length_relation import LengthRelation
from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.policies import BatchPolicy, Plan, WorkerPoolState
from marserve.frontend.configuration.model_schema import BY_LENGTH

# A batch is chosen from the most urgent jobs: as many as this number of full batches has, and at
# least the second number.
_BATCHES_LOOKED_AHEAD = 4
_MIN_LOOKED_AHEAD = 32
# With ``auto``, lengths matter from this share of the variance on that they explain, and until they
# explain the second one, which ``length`` always needs; and only if the costs of one size vary by
# the third.
_EXPLAINS = 0.5
_EXPLAINS_STILL = 0.25
_MIN_SPREAD = 0.1
# Where lengths have not mattered in this number of batches, one batch in these seconds is learnt.
_MANY_SAMPLES = 100
_WATCHING_SECONDS = 0.01
# How much of the average padding is the newest batch's.
_STEP = 0.05

# All sizes are tried if that takes no more steps than this; else some of them.
_MAX_STEPS = 1500
_SOME_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)

_length_of = attrgetter("length")


class LengthGrouping:
    """Forms the batches of one model version by length, if its settings or its costs require it."""

    def __init__(self, costs: LatencyModel) -> None:
        self.is_active = False
        self.learnt = LengthCosts()
        self.relation = LengthRelation()
        self.padding = 0.0  # its share in the last batches
        self.costs = CostsByLength(costs, self.learnt)
        self._learnt_at = -math.inf
        self._rows: list[Row] = []
        self._limit = 0
        #: The batches into which the queue was cut, by job.
        self._batches: dict[Job, list[Job]] = {}

    def reconfigure(self, batching: Batching) -> None:
        """Apply new settings."""
        self._batching = batching
        self._activate(self._pays())
        self._rows = []

    @property
    def why(self) -> str:
        """Why batches are formed by length now, or not, in a sentence."""
        learnt = self.learnt
        if not learnt.is_known:
            is_required = self._batching.bucket_by == BY_LENGTH
            return f"batchBucketBy is {BY_LENGTH}" if is_required else "learning"
        if learnt.spread < _MIN_SPREAD:
            return f"batches of one size differ in cost by {learnt.spread:.0%} only"
        return f"lengths explain {learnt.explained:.0%} of what batches of one size differ in cost"

    # -- learning ----------------------------------------------------------------------------------

    def learn(self, batch: Batch, seconds: float) -> float:
        """Learn from a batch; return what it would have taken with the reference length.

        May change `is_active`.
        """
        learnt, costs = self.learnt, self.costs
        if not self.is_active and learnt.samples >= _MANY_SAMPLES:
            if batch.closed < self._learnt_at + _WATCHING_SECONDS:
                return seconds
            self._learnt_at = batch.closed
        lengths = [self._length(job.input) for job in batch.jobs]
        longest = max(lengths)
        if longest:
            self.padding += _STEP * (1 - fmean(lengths) / longest - self.padding)
        is_first = not learnt.samples
        was_known = learnt.is_known
        if learnt.observe(batch.run_as, longest, seconds):
            self._rows = []
            self._activate(self._pays())
            if self.is_active and (is_first or learnt.is_known is not was_known):
                costs.relearn()
        return costs.as_reference(batch.run_as, longest, seconds)

    def learn_lengths(self, batch: Batch, found: Iterable[Sequence[float]], queue: JobQueue) -> int:
        """Learn the lengths that the handler reports: pairs of the index in a batch and the length.

        When its lengths are used from now on, or no longer, costs by length are learnt again.
        Return how many inputs it could not measure.
        """
        failures, is_changed = 0, False
        for index, length in found:
            if length == FAILED:
                failures += 1
            elif 0 <= index < len(batch) and is_length(length):
                seen = length_of(batch.jobs[int(index)].input)
                is_changed |= self.relation.learn(seen, length)
        self.relation.failures += failures
        if is_changed:
            self.learnt.forget()
            self.costs.forget()
            self._rows = []
            if self.is_active:
                self.measure(queue)
        return failures

    def _activate(self, is_active: bool) -> None:
        was_active, self.is_active = self.is_active, is_active
        if is_active and not was_active and self.learnt.samples:
            self.costs.relearn()
        elif was_active and not is_active:
            self.costs.relearn()
            self.costs.forget()

    def _pays(self) -> bool:
        learnt, is_required = self.learnt, self._batching.bucket_by == BY_LENGTH
        if is_required and not learnt.is_known:
            return True
        enough = _EXPLAINS_STILL if self.is_active or is_required else _EXPLAINS
        return learnt.explained >= enough and learnt.spread >= _MIN_SPREAD

    # -- choosing ----------------------------------------------------------------------------------

    def measure(self, jobs: Iterable[Job]) -> None:
        """Set the length of jobs."""
        for job in jobs:
            job.length = self._length(job.input)

    def begin(self) -> None:
        """Cut the queue again at the next choice, because it has changed."""
        self._batches = {}

    def plan(
        self, now: float, queue: JobQueue, policy: BatchPolicy, workers: WorkerPoolState
    ) -> tuple[Plan, Sequence[Job]]:
        """Plan the batch with the first job, of jobs of about its length; also return its jobs."""
        chosen = self.choose(queue, policy.size)
        plan = policy.plan(now, queue, workers)
        if plan.shed:
            return plan, ()
        if 0 < plan.take < len(chosen):
            chosen = self.choose(queue, plan.take)
        return plan, chosen

    def choose(self, queue: JobQueue, limit: int) -> Sequence[Job]:
        """Return the jobs, up to ``limit``, that leave with the first of those that share batches.

        `costs` are those of this batch from now on.
        """
        first = queue.first_sharing
        if limit != self._limit or first not in self._batches:
            self._cut(queue, limit)
        chosen = self._batches[first]
        self.costs.use_batch(self._batching.run_as(len(chosen)), chosen[-1].length)
        return chosen

    def refused(self, jobs: Iterable[Job]) -> None:
        """Note that jobs have left the queue without a batch."""
        for job in jobs:
            self._batches.pop(job, [job]).remove(job)

    def _cut(self, queue: JobQueue, limit: int) -> None:
        count = max(_MIN_LOOKED_AHEAD, _BATCHES_LOOKED_AHEAD * limit)
        jobs = sorted(queue.of_first_group(count), key=_length_of)
        lengths = [job.length for job in jobs]
        # Before the first batch, the assumed costs depend on the queued jobs.
        if limit != self._limit or not self._rows or not self.learnt.samples:
            typical = math.expm1(fmean(map(math.log1p, lengths)))  # the geometric mean
            row, run_as = self.learnt.row, self._batching.run_as
            self._rows = [(size, *row(run_as(size), typical)[1:]) for size in range(1, limit + 1)]
            self._limit = limit
        self._batches = {}
        for indices in cheapest_batches(lengths, self._rows):
            batch = jobs[indices.start : indices.stop]
            self._batches.update(dict.fromkeys(batch, batch))

    def _length(self, input_: Input) -> float:
        return self.relation.length(length_of(input_))


def cheapest_batches(lengths: Sequence[float], rows: Sequence[Row]) -> list[range]:
    """Cut rising lengths into batches, as ranges of indices, so that their total cost is least.

    Batches of jobs sorted by length are optimal: exchanging items of two batches for shorter ones
    in the batch of shorter items makes neither longer. Dynamic program: the best batches for the
    first n jobs are a last batch, and the best ones for the jobs before it. ``rows`` are the costs
    of batches of each size from 1 on.
    """
    if len(lengths) * len(rows) > _MAX_STEPS:
        largest = rows[-1][0]
        rows = [row for row in rows if row[0] in _SOME_SIZES or row[0] == largest]
    least, last = [0.0], [0]
    for count, longest in enumerate(lengths, 1):
        square = longest * longest
        best, size_of_best = math.inf, 1
        for size, p, q, r in rows:
            if size > count:
                break
            cost = least[count - size] + p + q * longest + r * square
            if cost < best:
                best, size_of_best = cost, size
        least.append(best)
        last.append(size_of_best)
    batches, end = [], len(lengths)
    while end:
        batches.append(range(end - last[end], end))
        end -= last[end]
    return batches
