"""The batcher: forms batches from the queue of a model version and sends them to idle workers.

It is driven by events (a job arrives, a worker becomes idle, a window closes), and sends a batch
within the event that closes it. A task per worker that awaits its next batch would cost two more
turns of the event loop per batch, and could lose a batch if it were cancelled in the same turn.
"""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from marserve.frontend.batching.batch_runners import BatchRunner, BatchRunners
from marserve.frontend.batching.batches import Batch, History, Lengths, Reason
from marserve.frontend.batching.compiled_sizes import CompiledSizes
from marserve.frontend.batching.deadlines import Clock, DeadlineAdmission
from marserve.frontend.batching.isolation.failure_isolation import FailureIsolation
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Job
from marserve.frontend.batching.learning.latency_model import LatencyModel
from marserve.frontend.batching.learning.learning import Learning
from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.policies import MAX_SHED, Plan
from marserve.frontend.errors import Overloaded

# uvloop rounds timers to milliseconds; with a shorter one it would spin until the time is up.
_TIMER_SECONDS = 0.001
# How long a suspected job waits for a worker with continuous batching before no others join there.
_SUSPECTED_SECONDS = 1.0
_TOO_MANY_SUSPECTED = "Too many requests whose content has failed before are waiting."
_outstanding = attrgetter("outstanding")
_ALONE = Plan(1, Reason.ALONE)
_SUSPECTED = Plan(1, Reason.SUSPECTED)


class Batcher:
    """Forms the batches of one model version and sends them to its workers.

    With ``parent``, the batcher of a model version, it is the batcher of one of its workers: it has
    its own queue, and shares what is learnt and recorded. The clock is not the event loop's: that
    of uvloop has a resolution of milliseconds.
    """

    def __init__(
        self,
        queue: JobQueue,
        batching: Batching,
        loop: asyncio.AbstractEventLoop,
        clock: Clock = time.monotonic,
        parent: "Batcher | None" = None,
    ) -> None:
        self.isolation: FailureIsolation = parent.isolation if parent else FailureIsolation(clock)
        self.learning: Learning = parent.learning if parent else Learning(self.isolation)
        self.history: History = parent.history if parent else History(clock)
        self.costs: LatencyModel = self.learning.costs
        self.queue = queue
        self.workers = BatchRunners()
        self.deadline_admission = DeadlineAdmission(queue, self.workers, self.learning, clock)
        self.has_rows = False  # whether jobs may be rows of requests, whose inputs are made late
        #: Called when jobs have left the queue for a worker, while lists wait to be queued.
        self.on_sent: Callable[[], object] | None = None
        self._clock = clock
        self._window = _Window(loop, self._dispatch)
        self.reconfigure(batching)

    @property
    def size(self) -> int:
        """The largest batch now."""
        return self._policy.size

    def reconfigure(self, batching: Batching) -> None:
        """Apply new batching settings, from the next batch on."""
        self.batching = batching
        self.learning.reconfigure(batching)
        self._make_policy()
        self._dispatch_waiting()

    def distrust(self, why: str) -> None:
        """Form no batches for this reason, unless the settings have their size."""
        self.learning.distrusted = why
        self._resize()

    def _make_policy(self) -> None:
        batching, queue = self.batching, self.queue
        lengths = self._lengths = self.learning.active_lengths
        self._costs = costs = lengths.costs if lengths else self.costs
        sizes = batching.compiled_sizes
        self._compiled = CompiledSizes(sizes, costs) if sizes else None
        self._policy = policy = batching.make_policy(self._compiled or costs)
        queue.reorder(lambda job: policy.order(job.arrived, job.deadline, job.priority))
        if lengths:
            policy.max_shed = 1  # other jobs leave in batches of other lengths
            lengths.measure(queue)
        self.deadline_admission.reconfigure(batching, policy, lengths)
        self._resize()

    def _resize(self) -> None:
        self.queue.resize(self.learning.queue_capacity, self.batching.capacities)
        self._policy.size = self.learning.max_size(self._clock())

    # -- jobs --------------------------------------------------------------------------------------

    def put(self, *jobs: Job, behind: int = 0) -> None:
        """Queue the jobs of one request, all or none; then send the batches that this completes.

        The caller has checked the capacity of the queue, and will queue ``behind`` further jobs of
        the request.

        Raises:
            Overloaded: They could not be answered in time, or too many suspected jobs wait.
        """
        if self.isolation.is_alert:
            self._suspect(jobs)
        self.deadline_admission.add(jobs, behind)
        queue = self.queue
        if self.workers.idle and (
            self._window.timer is None
            or queue.sharing_count >= self._window.full
            # The open window may be too long for a job with a deadline, or one that goes first.
            or jobs[0].deadline < math.inf
            or queue.first is jobs[0]
            or queue.suspected_count  # one of these: others would have left before
            or jobs[0].is_row_of_list
        ):
            self._dispatch()

    def _suspect(self, jobs: Sequence[Job]) -> None:
        """Mark the jobs whose contents have failed before."""
        suspected = [job for job in jobs if job in self.isolation.contents]
        if suspected and not self.queue.has_capacity_for_suspected(len(suspected)):
            raise Overloaded(self.queue.capacity * self.costs.mean(1), _TOO_MANY_SUSPECTED)
        for job in suspected:
            job.is_suspected = True

    def requeue(self, jobs: Iterable[Job]) -> None:
        """Queue jobs again whose worker died; those that may be the cause will run alone."""
        for job in jobs:
            if self._lengths:
                self._lengths.measure((job,))
            self.queue.requeue(job)
        self._dispatch_waiting()

    def take(self, group: Group, beside: int) -> Sequence[Job]:
        """Take jobs that join the ``beside`` jobs of the same group that a worker is running.

        Takes none while the first in the queue belongs to another group, or must run alone.
        """
        now, queue = self._now(), self.queue
        free = self.size - beside
        if free <= 0 or not queue.sharing_count or queue.is_held_up(now - _SUSPECTED_SECONDS):
            return ()
        if group is Group.DESCRIBE or queue.first_sharing.group is not group:
            return ()
        jobs = queue.pop_sharing(free)
        for job in jobs:
            job.dispatched = now
        if self.on_sent is not None:
            self.on_sent()
        return jobs

    # -- workers -----------------------------------------------------------------------------------

    def mark_idle(self, runner: BatchRunner, done: Batch | None = None) -> None:
        """Mark a worker as ready for one batch; ``done`` is the batch it has just finished."""
        self._note_done(done)
        self.workers.waiting.append(runner)
        self.workers.idle += 1
        if self.queue:
            self._dispatch()

    def mark_done(self, batch: Batch) -> None:
        """Note that a worker has finished a batch, without requesting another."""
        self._note_done(batch)
        self._dispatch_waiting()  # the policy may decide otherwise now

    def _note_done(self, batch: Batch | None) -> None:
        workers = self.workers
        workers.last_idle_at = self._clock()
        if batch is not None and workers.busy.pop(batch, None) is not None:
            self._policy.answered(workers.last_idle_at, len(batch))

    def remove(self, runner: BatchRunner, batches: Iterable[Batch]) -> None:
        """Remove a worker and the batches that it has. Safe to call twice."""
        self.workers.remove(runner, batches)
        if not self.workers.idle and self._window.timer is not None:
            self._window.close(0.0)

    @property
    def quiet_seconds(self) -> float:
        """Seconds since a worker last had a job; 0 while jobs wait or run."""
        workers = self.workers
        return 0.0 if self.queue or workers.busy else self._clock() - workers.last_idle_at

    def lend(self, runner: BatchRunner, seconds: float) -> None:
        """Send an idle worker no batches until it is taken back, probably after these seconds."""
        self.workers.remove(runner)
        self.workers.busy[runner] = self._clock() + seconds, 0

    def take_back(self, runner: BatchRunner) -> None:
        """Use a worker again that was lent."""
        self.workers.busy.pop(runner, None)
        self.mark_idle(runner)

    # -- results -----------------------------------------------------------------------------------

    def record(self, batch: Batch, seconds: float, *, succeeded: bool) -> None:
        """Record a finished batch; its jobs are answered in the same turn of the event loop."""
        # Explanations and descriptions do not cost what predictions cost.
        if succeeded and batch.jobs[0].group is Group.PREDICT:
            self.deadline_admission.answered(batch.closed + seconds)
            if self.learning.observe(batch, seconds, self._clock()):
                if self.learning.active_lengths is self._lengths:
                    self._resize()
                else:
                    self._make_policy()
        self.history.add(batch, seconds, succeeded=succeeded)
        if succeeded and batch.run_as >= self.isolation.fails_from:
            self.isolation.size_succeeded()
        if not succeeded:
            self.isolation.run_failed(batch, seconds)
        elif self.isolation.is_alert:
            self.isolation.succeeded(batch)
            self.note_failures()

    def seed(self, costs: Iterable[tuple[float, float]], *, is_complete: bool = True) -> None:
        """Learn measured costs (`Learning.seed`)."""
        self.learning.seed(costs, is_complete=is_complete)
        self._resize()

    def learn_lengths(self, batch: Batch, found: Iterable[Sequence[float]]) -> int:
        """Learn the lengths that the handler reports; return how many it could not measure."""
        lengths = self.learning.lengths
        return 0 if lengths is None else lengths.learn_lengths(batch, found, self.queue)

    def note_failures(self) -> None:
        """Adapt the batch size to the share of failing requests, if that has changed."""
        if self.learning.failures_changed():
            before = self.size
            self._resize()
            if self.size < before:
                self._dispatch_waiting()  # a window may be open for a larger batch

    def out_of_memory(self, size: int) -> None:
        """Limit the batch size for a while: ``size`` rows did not fit into memory."""
        self.limit_size(size, "a larger batch needed more memory than there is")

    def failed_together(self, size: int) -> None:
        """Note that a batch of ``size`` rows failed, and none of its requests alone."""
        if found := self.isolation.failed_together(size):
            self.limit_size(found, f"batches of {found} fail, and their requests alone do not")

    def limit_size(self, size: int, why: str, fits: int = 1) -> None:
        """Limit the batch size for a while: a batch of ``size`` failed, one of ``fits`` did not."""
        self.learning.cap.exceeded(size, self._clock(), why, fits)
        self._resize()

    def _now(self) -> float:
        """Return the current time; raises the cap of the batch size if that is due."""
        now = self._clock()
        if now >= self.learning.cap.grows_at:
            self._resize()
        return now

    # -- batches -----------------------------------------------------------------------------------

    def _dispatch_waiting(self) -> None:
        if self.workers.idle and self.queue:
            self._dispatch()

    def _dispatch(self) -> None:
        now, queue, workers = self._now(), self.queue, self.workers
        held = self._window.close(now) if self._window.timer is not None else 0.0
        if self._lengths is not None:
            self._lengths.begin()
        shed = 0
        while workers.idle and queue:
            if shed >= MAX_SHED:
                self._window.pause(now)
                return
            plan, chosen = self._plan(now)
            if plan.shed:
                self._shed(plan.shed)
                shed += plan.shed
            if plan.take:
                popped = queue.pop_chosen(chosen) if chosen else queue.pop(plan.take)
                self._send(plan, popped, now, held)
                held = 0.0
            # Suspected jobs do not wait for the window of others.
            elif queue.suspected_count and not plan.shed:
                self._send(_SUSPECTED, queue.pop_suspected(), now, 0.0)
            elif not plan.shed:
                self._window.open(plan, now, held, queue)
                return

    def _plan(self, now: float) -> tuple[Plan, Sequence[Job]]:
        """Plan the next batch; also return its jobs, unless they are the first of the queue."""
        queue = self.queue
        if queue.first_runs_alone:
            first = queue.first
            is_suspected = first.is_suspected and not first.crashes
            return (_SUSPECTED if is_suspected else _ALONE), ()
        if self._lengths is not None:
            return self._lengths.plan(now, queue, self._policy, self.workers)
        plan = self._policy.plan(now, queue, self.workers)
        if plan.take:
            if self.learning.exploration.size:
                plan = self.learning.exploration.change(plan, now, queue, self.size)
            if self._compiled is not None:
                plan = self._compiled.fit(plan, self.size, now, queue)
        return plan, ()

    def _shed(self, count: int) -> None:
        dropped = self.queue.drop(count)
        if self._lengths is not None:
            self._lengths.refused(dropped)
        self.deadline_admission.refuse(dropped)

    def _send(self, plan: Plan, popped: Sequence[Job], now: float, held: float) -> None:
        jobs = self.deadline_admission.without_late(popped, now)
        if not jobs:
            return
        # By the jobs really taken, which may be fewer than planned: some were cancelled, or the
        # next one belongs to another group.
        is_described = jobs[0].group is Group.DESCRIBE
        run_as = len(jobs) if is_described else self.batching.run_as(len(jobs))
        predicted = self._costs.mean(run_as)
        # The worker with the fewest outstanding batches; among equals the one idle for longest.
        workers = self.workers
        waiting = workers.waiting
        runner = waiting[0] if workers.idle == 1 else min(waiting, key=_outstanding)
        batch = Batch(jobs, now, plan.reason, run_as, predicted, held)
        for job in jobs:
            job.dispatched, job.batch = now, batch
        if self._lengths is not None:
            batch.lengths = Lengths.of(jobs)
        waiting.remove(runner)
        workers.idle -= 1
        workers.busy[batch] = now + predicted, len(jobs)
        runner.run(batch)
        if self.on_sent is not None:
            self.on_sent()


class _Window:
    """A batch that is held open for further jobs; ``full`` is the number with which that ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_over: Callable[[], None]) -> None:
        self.timer: asyncio.TimerHandle | None = None
        self.full = 0
        self._opened = 0.0
        self._loop = loop
        self._on_over = on_over

    def open(self, plan: Plan, now: float, held: float, queue: JobQueue) -> None:
        """Open the window of a plan, which was open for ``held`` seconds before."""
        self.full = plan.full
        # The job that it was opened for may be cancelled: the hold of the others began later.
        self._opened = max(now - held, queue.oldest_arrival)
        remaining = max(plan.until - now, _TIMER_SECONDS)
        self.timer = self._loop.call_later(remaining, self._on_over)

    def pause(self, now: float) -> None:
        """Continue in the next iteration of the event loop, after other events."""
        self.full, self._opened = sys.maxsize, now
        self.timer = self._loop.call_later(0.0, self._on_over)

    def close(self, now: float) -> float:
        """Close the open window; return for how many seconds it was open."""
        assert self.timer is not None
        self.timer.cancel()
        self.timer = None
        return now - self._opened
