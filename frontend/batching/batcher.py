"""The batcher: forms batches from the queue of a model version and sends them to idle workers.

It is driven by events (a job came, a worker became idle, a window closed), and sends a batch within
the event that closed it. A task per worker that awaits its next batch would cost two more turns of
the event loop per batch, and could lose a batch if it were cancelled in the same turn.

`deadlines` decides which jobs are admitted, `sizing` how large batches are, the policy when they
are sent.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

from marserve.frontend.batching.batches import Batch, History, Lengths, Reason
from marserve.frontend.batching.deadlines import Clock, DeadlineAdmission
from marserve.frontend.batching.exploration import Exploration
from marserve.frontend.batching.isolation.failure_isolation import FailureIsolation
from marserve.frontend.batching.isolation.failure_rate import candidates, cheapest_size
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Job
from marserve.frontend.batching.latency_model import MIN_SECONDS, Costs, LatencyModel
from marserve.frontend.batching.lengths.length_grouping import LengthGrouping
from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.policies import Plan, WorkerPoolState
from marserve.frontend.batching.sizing import BatchSizing, CompiledSizes
from marserve.frontend.configuration.model_schema import UNSORTED
from marserve.frontend.errors import Overloaded

# uvloop rounds timers to milliseconds; with a shorter one it would spin until the time is up.
_TIMER_SECONDS = 0.001
# Batch sizes are recalculated after the first batch, and then after this many.
_BATCHES_LOOKED_AT = 100
# Costs are learnt from at most one batch in this time: learning from each of many short batches
# would take longer than running them.
_LEARNING_SECONDS = 0.002
# Batch sizes are recalculated when the share of failing requests has changed by this factor.
_SHARE_CHANGED = 1.2
# How long a suspected job waits for a worker with continuous batching before no others join there.
_SUSPECTED_SECONDS = 1.0
_ALONE = Plan(1, Reason.ALONE)
_SUSPECTED = Plan(1, Reason.SUSPECTED)

_outstanding = attrgetter("outstanding")


class BatchRunner(Protocol):
    """A worker, as the batcher sees it."""

    @property
    def outstanding(self) -> int:
        """How many batches were sent to it and are not answered yet."""

    def run(self, batch: Batch) -> None:
        """Begin to work on a batch; returns at once and never raises."""


class Batcher:
    """Forms the batches of one model version and sends them to its workers.

    With ``model``, the batcher of a model version, it is the batcher of one of its workers: it has
    a queue of its own, and shares what is learnt and recorded.

    The clock is not the event loop's, because uvloop's has a resolution of milliseconds only.
    """

    def __init__(
        self,
        queue: JobQueue,
        batching: Batching,
        loop: asyncio.AbstractEventLoop,
        clock: Clock = time.monotonic,
        model: "Batcher | None" = None,
    ) -> None:
        self.costs: LatencyModel = model.costs if model else LatencyModel()
        self.isolation: FailureIsolation = model.isolation if model else FailureIsolation(clock)
        self.history: History = model.history if model else History(clock)
        self.sizing: BatchSizing = model.sizing if model else BatchSizing(self.costs)
        self.exploration: Exploration = model.exploration if model else Exploration(self.costs)
        #: Forms batches by length; None where settings do not ask for it. And the same, where it
        #: does so now.
        self.lengths: LengthGrouping | None = None
        self._active_lengths: LengthGrouping | None = None
        #: What comparing batches with single requests has found, when a worker loaded the model.
        self.validation: Mapping[str, Any] = {}
        self._queue = queue
        self._loop = loop
        self._clock = clock
        self._idle: deque[BatchRunner] = deque()
        self.workers = WorkerPoolState()
        self.deadlines = DeadlineAdmission(queue, self.workers, self.costs, clock)
        self._window: asyncio.TimerHandle | None = None
        self._window_opened = 0.0
        self._full = 0
        self._share_used = 0.0
        #: Whether rows of requests in tensors may be among its jobs (`batching.rows`).
        self.has_rows = False
        self.reconfigure(batching)

    @property
    def size(self) -> int:
        """The largest batch now."""
        return self._policy.size

    def reconfigure(self, batching: Batching) -> None:
        """Apply new batching settings, from the next batch on."""
        self.batching = batching
        self.has_rows = self.has_rows or batching.splits_lists
        if batching.bucket_by == UNSORTED:
            self.lengths = None
        else:
            self.lengths = self.lengths or LengthGrouping(self.costs)
            self.lengths.reconfigure(batching)
        self.sizing.reconfigure(batching)
        self.exploration.reconfigure(batching)
        self._share_used = 0.0
        self._renew_policy()
        self._dispatch_waiting()

    def _renew_policy(self) -> None:
        """Make the policy for the settings, and for batches by length or not."""
        batching, lengths = self.batching, self.lengths
        lengths = self._active_lengths = lengths if lengths and lengths.is_active else None
        self._costs_of_batches: Costs = lengths.costs if lengths else self.costs
        sizes = batching.compiled_sizes
        self._compiled = CompiledSizes(sizes, self._costs_of_batches) if sizes else None
        self._policy = policy = batching.make_policy(self._compiled or self._costs_of_batches)
        if lengths:
            policy.max_shed = 1
        self._queue.reorder(lambda job: policy.order(job.arrived, job.deadline, job.priority))
        if lengths:
            lengths.measure(self._queue)
        self.deadlines.reconfigure(batching, policy, lengths)
        self._resize()

    def seed(self, costs: Iterable[tuple[float, float]], *, is_complete: bool = True) -> None:
        """Learn measured costs: pairs of batch size and seconds.

        If they are complete, nothing better is expected of sizes that are not among them.
        """
        if is_complete:
            self.sizing.seed(costs)
        else:
            self.costs.seed(costs)
        self._resize()

    # -- jobs --------------------------------------------------------------------------------------

    def put(self, *jobs: Job) -> None:
        """Queue the jobs of one request, all or none; then send the batches that this completes.

        The caller has checked that there is room for them.

        Raises:
            Overloaded: One of them could not be answered in time, or too many wait whose contents
                have failed before.
        """
        if self.isolation.is_alert:
            self._suspect(jobs)
        self.deadlines.add(jobs)
        if self._idle and (
            self._window is None
            or self._queue.sharing >= self._full
            # The open window may be too long for a job with a deadline, or one that goes first.
            or jobs[0].deadline < math.inf
            or self._queue.first is jobs[0]
            or self._queue.suspected  # one of these: others would have left before
            or jobs[0].is_row_of_list
        ):
            self._dispatch()

    def _suspect(self, jobs: Sequence[Job]) -> None:
        """Have the jobs run alone whose contents have failed before."""
        suspected = [job for job in jobs if job in self.isolation.contents]
        if suspected and not self._queue.has_seat_for_suspected(len(suspected)):
            raise Overloaded(self._queue.capacity * self.costs.mean(1))
        for job in suspected:
            job.is_suspected = True

    def discard(self, job: Job) -> None:
        """Remove a job from the queue; does nothing if it was sent to a worker already."""
        self._queue.discard(job)

    def clear(self) -> list[Job]:
        """Remove and return all jobs of the queue."""
        return self._queue.clear()

    @property
    def queued(self) -> int:
        """How many jobs wait in the queue."""
        return len(self._queue)

    def requeue(self, jobs: Iterable[Job]) -> None:
        """Queue jobs again whose worker died; those that may be the cause will run alone."""
        for job in jobs:
            if lengths := self._active_lengths:
                lengths.measure((job,))
            self._queue.requeue(job)
        self._dispatch_waiting()

    # -- workers -----------------------------------------------------------------------------------

    def mark_idle(self, runner: BatchRunner, done: Batch | None = None) -> None:
        """Mark a worker as ready for one batch; ``done`` is the batch it has just finished."""
        self._note_done(done)
        self._idle.append(runner)
        self.workers.idle = len(self._idle)
        if self._queue:
            self._dispatch()

    def mark_done(self, batch: Batch) -> None:
        """Note that a worker has finished a batch, without asking for another."""
        self._note_done(batch)
        self._dispatch_waiting()  # the policy may decide otherwise now

    def replace(self, batch: Batch, part: Batch) -> None:
        """Note that the worker of a batch is now busy with a part of it."""
        if self.workers.busy.pop(batch, None) is not None:
            self.workers.busy[part] = part.closed + part.predicted, len(part)

    def remove(self, runner: BatchRunner, batches: Iterable[Batch]) -> None:
        """Remove a worker and the batches that it has. Safe to call twice."""
        self.workers.busy.pop(runner, None)  # it may be lent
        for batch in batches:
            self.workers.busy.pop(batch, None)
        if runner in self._idle:
            self._idle.remove(runner)
            self.workers.idle = len(self._idle)
            if not self._idle:
                self._close_window()

    @property
    def quiet_seconds(self) -> float:
        """For how long no worker has had a request, and none waits; 0 if there are any."""
        workers = self.workers
        return 0.0 if self._queue or workers.busy else self._clock() - workers.last_idle_at

    @property
    def idle_runners(self) -> Sequence[BatchRunner]:
        """The workers that wait for a batch; the one that waits longest is the first."""
        return tuple(self._idle)

    def lend(self, runner: BatchRunner, seconds: float) -> None:
        """Send an idle worker no batches until it is taken back, probably after these seconds."""
        self._idle.remove(runner)
        self.workers.idle -= 1
        self.workers.busy[runner] = self._clock() + seconds, 0

    def take_back(self, runner: BatchRunner) -> None:
        """Use a worker again that was lent."""
        self.workers.busy.pop(runner, None)
        self.mark_idle(runner)

    def take(self, group: Group, beside: int) -> Sequence[Job]:
        """Take jobs that may join the ``beside`` jobs of the same group that a worker is running.

        Takes none while the first in the queue belongs to another group, or must run alone.
        """
        now, queue = self._now(), self._queue
        room = self.size - beside
        if room <= 0 or not queue.sharing or queue.is_held_up(now - _SUSPECTED_SECONDS):
            return ()
        if group is Group.DESCRIBE or queue.first_sharing.group is not group:
            return ()
        jobs = queue.pop_sharing(room)
        _mark_dispatched(jobs, now)
        return jobs

    def _note_done(self, batch: Batch | None) -> None:
        workers = self.workers
        workers.last_idle_at = self._clock()
        if batch is not None and workers.busy.pop(batch, None) is not None:
            self._policy.answered(workers.last_idle_at, len(batch))

    # -- costs and sizes ---------------------------------------------------------------------------

    def record(self, batch: Batch, seconds: float, *, succeeded: bool) -> None:
        """Record a finished batch; its jobs are answered in the same turn of the event loop."""
        # Explanations and descriptions do not cost what predictions cost.
        if succeeded and batch.jobs[0].group is Group.PREDICT:
            deadlines = self.deadlines
            deadlines.answered(batch.closed + seconds)
            # Not by when they began: of several workers' batches only the fast ones would count.
            now = self._clock()
            if now >= deadlines.learnt_at + _LEARNING_SECONDS:
                deadlines.learnt_at = now
                seconds = max(seconds, MIN_SECONDS)
                learnt = seconds if self.lengths is None else self._learn_lengths(batch, seconds)
                self.costs.observe(batch.run_as, learnt)
                is_settled = self.exploration.learn(batch, learnt, self.size, self.sizing.largest)
                samples = self.costs.samples
                if is_settled or samples == 1 or not samples % _BATCHES_LOOKED_AT:
                    self._resize()
        self.history.add(batch, seconds, succeeded=succeeded)
        if not succeeded:
            self.isolation.run_failed(batch, seconds)
        elif self.isolation.is_alert:
            self.isolation.succeeded(batch)
            self.note_failures()

    def _learn_lengths(self, batch: Batch, seconds: float) -> float:
        assert self.lengths is not None
        was_active = self.lengths.is_active
        learnt = self.lengths.learn(batch, seconds)
        if self.lengths.is_active is not was_active:
            self._renew_policy()
        return learnt

    def learn_lengths(self, batch: Batch, found: Iterable[Sequence[float]]) -> int:
        """Learn what the handler says that lengths are, see `LengthGrouping.learn_lengths`."""
        if self.lengths is None:
            return 0
        was_used = self.lengths.relation.is_used
        failures = self.lengths.learn_lengths(batch, found)
        if self.lengths.is_active and self.lengths.relation.is_used is not was_used:
            self.lengths.measure(self._queue)  # what waits, too, by what counts now
        return failures

    def note_failures(self) -> None:
        """Adapt the batch size to the share of failing requests, if that has changed."""
        rate = self.isolation.rate
        share = 0.0 if rate.fails_for_all or not self.costs.is_known else rate.share
        low, high = sorted((share, self._share_used))
        if high > _SHARE_CHANGED * low:
            self._share_used = share
            before = self.size
            self._resize()
            if self.size < before:
                self._dispatch_waiting()  # a window may be open for a larger batch

    def out_of_memory(self, size: int, fits: int = 1) -> None:
        """Limit the batch size for a while: ``size`` rows did not fit into memory, ``fits`` did."""
        self.sizing.memory.exceeded(size, self._clock(), fits)
        self._resize()

    def _now(self) -> float:
        """The current time; raises a memory limit again if that is due."""
        now = self._clock()
        if now >= self.sizing.memory.grows_at:
            self._resize()
        return now

    def _resize(self) -> None:
        """Set the largest batch size by settings, costs, memory limit and failures."""
        self.sizing.share_failing, hints = self._share_used, self.isolation.hints
        if self._share_used:
            self.sizing.cheapest = cheapest_size(
                candidates(self.batching.max_size, self.batching.compiled_sizes),
                self._share_used,
                self._compiled or self.costs,
                hints.hinted,
                hints.checked,
                self.isolation.rate.cost,
            )
        self._queue.resize(self.sizing.queue_capacity, self.batching.seats)
        size = self.sizing.max_size(self._clock())
        self.exploration.limit(self.sizing.largest)
        self._policy.size = self._compiled.limit(size) if self._compiled else size

    # -- batches -----------------------------------------------------------------------------------

    def _dispatch_waiting(self) -> None:
        if self._idle and self._queue:
            self._dispatch()

    def _dispatch(self) -> None:
        now, queue = self._now(), self._queue
        held = now - self._window_opened if self._window is not None else 0.0
        self._close_window()
        lengths = self._active_lengths
        if lengths is not None:
            lengths.begin()
        while self._idle and queue:
            if lengths is None or queue.first_runs_alone:
                plan = self._plan(now)
                chosen = None
            else:
                plan, chosen = self._plan_by_length(now, lengths)
            if plan.shed:
                self._shed(plan.shed)
            if plan.take:
                popped = queue.pop_chosen(chosen) if chosen else queue.pop(plan.take)
                self._send(plan, popped, now, held)
                held = 0.0
            elif queue.suspected and not plan.shed:  # they need not wait for the window of others
                self._send(_SUSPECTED, self._queue.pop_suspected(), now, 0.0)
            elif not plan.shed:
                self._open_window(plan, now, held)
                return

    def _plan(self, now: float) -> Plan:
        if self._queue.first_runs_alone:
            first = self._queue.first
            return _SUSPECTED if first.is_suspected and not first.crashes else _ALONE
        plan = self._policy.plan(now, self._queue, self.workers)
        if plan.take:
            if self.exploration.size:
                plan = self.exploration.change(plan, now, self._queue, self.size)
            if self._compiled is not None:
                return self._compiled.fit(plan, now, self._queue)
        return plan

    def _plan_by_length(self, now: float, lengths: LengthGrouping) -> tuple[Plan, Sequence[Job]]:
        """The same for batches by length: the plan for the batch with the first job, and its jobs.

        Another job would leave with others: so the policy refuses only the first before the next
        plan (`BatchPolicy.max_shed`).
        """
        chosen = lengths.choose(self._queue, self.size)
        plan = self._policy.plan(now, self._queue, self.workers)
        if plan.shed:
            return plan, ()
        if 0 < plan.take < len(chosen):
            chosen = lengths.choose(self._queue, plan.take)
        return plan, chosen

    def _shed(self, count: int) -> None:
        dropped = self._queue.drop(count)
        if lengths := self._active_lengths:
            lengths.refused(dropped)
        self.deadlines.refuse(dropped)

    def _send(self, plan: Plan, popped: Sequence[Job], now: float, held: float) -> None:
        jobs = self.deadlines.without_late(popped, now)
        if not jobs:
            return
        _mark_dispatched(jobs, now)
        # By the jobs really taken, which may be fewer than planned: some were cancelled, or the
        # next one belongs to another group.
        is_described = jobs[0].group is Group.DESCRIBE
        run_as = len(jobs) if is_described else self.batching.run_as(len(jobs))
        predicted = self._costs_of_batches.mean(run_as)
        batch = Batch(jobs, now, plan.reason, run_as, predicted, held)
        if self._active_lengths is not None:
            batch.lengths = Lengths.of(jobs)
        # The worker with the fewest outstanding batches; among equals the one idle for longest.
        idle = self._idle
        runner = idle[0] if len(idle) == 1 else min(idle, key=_outstanding)
        idle.remove(runner)
        self.workers.idle -= 1
        self.workers.busy[batch] = now + predicted, len(jobs)
        runner.run(batch)

    def _open_window(self, plan: Plan, now: float, held: float) -> None:
        self._full = plan.full
        # The job that it was opened for may be cancelled: the hold of the others began later.
        self._window_opened = max(now - held, self._queue.oldest_arrival)
        remaining = max(plan.until - now, _TIMER_SECONDS)
        self._window = self._loop.call_later(remaining, self._dispatch)

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None


def _mark_dispatched(jobs: Sequence[Job], now: float) -> None:
    for job in jobs:
        job.dispatched = now
