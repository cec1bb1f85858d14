"""Collects jobs for idle workers until the policy says go.

An idle worker enlists, nothing is pushed at a busy one: order, backpressure and the choice of a
free worker need no code. It is driven by events alone (a job came, a worker became idle, a window
closed), and hands a batch over within the event that closed it. A task per worker that awaits its
next batch reads a little better, but costs two more turns of the loop per batch, and a batch that
was handed to a waiter which is cancelled in the same turn would have to be found again.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Protocol

from marserve.frontend.batching.batches import Batch, History, Reason
from marserve.frontend.batching.jobs import Group, Job, JobQueue
from marserve.frontend.batching.latency_model import LatencyModel
from marserve.frontend.batching.options import ADAPTIVE, Batching
from marserve.frontend.batching.policies import Crew, Plan
from marserve.frontend.batching.sizing import Choice, MemoryCap, knee, largest_that_pays
from marserve.frontend.errors import Overloaded

Clock = Callable[[], float]

# What uvloop rounds its timers to; asked for less, it would turn round and round till time is up.
_TIMER_SECONDS = 0.001
# Of so many answers with a deadline, this share may be late before estimates become more careful.
_ANSWERS_LOOKED_AT = 200
_MOST_LATE = 0.01
# Batches to learn from before a size is chosen by them, and then again.
_BATCHES_LOOKED_AT = 100
# So many of a size must have run: a single fast one says little. What a sweep tried counts as that.
_BATCHES_OF_A_SIZE = 5
_LESSON_SECONDS = 0.002
# A size that traffic must have reached before sizes are judged by it.
_SIZE_TO_SEE = 8
# However long the latency goal: so many requests are kept in memory.
_MOST_SEATS = 10_000
# Whoever comes when nothing was learnt for so long is tried, whatever is foreseen: else a cost that
# was overestimated would never be corrected. Sooner where that takes a small share of an idle
# worker's time: a model of a few milliseconds that was slow for a moment refused everybody for as
# many seconds as it takes lessons to forget that.
_PROBE_SECONDS = 1.0
_PROBE_SHARE = 0.2
_ALONE = Plan(1, Reason.ALONE)

_in_hand_of = attrgetter("in_hand")


class BatchRunner(Protocol):
    """A worker, as the batcher sees it."""

    @property
    def in_hand(self) -> int:
        """Batches it has in hand beside the one that it asks for."""

    def run(self, batch: Batch) -> None:
        """Begin to work on a batch; returns at once and never raises."""


class Timer(Protocol):
    """What is going to ring."""

    def cancel(self) -> None:
        """It shall not."""


class Timers(Protocol):
    """What rings when a window closes: an event loop."""

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Call back after ``delay`` seconds."""


class _LeastInHandFirst(deque[BatchRunner]):
    """Workers that wait for a batch, where they may have others in hand."""

    def popleft(self) -> BatchRunner:
        """Take out the one with the fewest; of several, whoever has waited longest."""
        chosen = min(self, key=_in_hand_of)
        self.remove(chosen)
        return chosen


class Batcher:
    """Turns the queue of one model version into batches for its workers.

    Args:
        queue: Where the jobs wait.
        batching: How they become batches.
        loop: Rings when a window closes.
        clock: Tells the time, in seconds. Not the loop's own: uvloop's counts milliseconds.

    Attributes:
        costs: What batches cost, as learnt so far.
        history: The last batches.
        choice: The size that was found, where that is automatic, and why; None before that.
        why: Why batches are no larger than `size`, where nobody has said so; else empty.
        refused: Jobs so far that could not have been answered in time.
    """

    def __init__(
        self, queue: JobQueue, batching: Batching, loop: Timers, clock: Clock = time.monotonic
    ) -> None:
        self.costs = LatencyModel()
        self.history = History(clock)
        self.choice: Choice | None = None
        self.why = ""
        self.refused = 0
        self._queue = queue
        self._loop = loop
        self._clock = clock
        self._idle: deque[BatchRunner] = deque()
        self._crew = Crew()
        self._window: Timer | None = None
        self._window_opened = 0.0
        self._full = 0
        self._cap = MemoryCap()
        self._is_swept = False
        self._learnt_at = self._probed_at = -math.inf
        self._finished_at = self._handed_over_at = 0.0
        self._punctuality = _Punctuality(self.costs)
        self.reconfigure(batching)

    @property
    def batching(self) -> Batching:
        """How jobs become batches, as it was settled."""
        return self._batching

    @property
    def size(self) -> int:
        """The most jobs in a batch now."""
        return self._policy.size

    @property
    def idle(self) -> int:
        """Workers that wait for a batch."""
        return len(self._idle)

    def reconfigure(self, batching: Batching) -> None:
        """Change how jobs become batches, from the next one on.

        What memory has room for is found out anew.
        """
        self._cap = MemoryCap()
        self._batching = batching
        self.choice = None
        self._policy = policy = batching.make_policy(self.costs)
        self._queue.reorder(lambda job: policy.order(job.arrived, job.deadline, job.priority))
        self._adjust()
        if self._idle and self._queue:
            self._dispatch()

    def seed(self, costs: Iterable[tuple[float, float]]) -> None:
        """Learn from what was measured before any traffic: pairs of size and seconds."""
        self._is_swept = True
        self.costs.seed(costs)
        self._adjust()

    # -- jobs --------------------------------------------------------------------------------------

    def admit(self, job: Job) -> None:
        """Settle where in the line a job goes; the caller has asked for a seat.

        Raises:
            Overloaded: It could not be answered in time.
        """
        seconds = self._place(job)
        if seconds is not None:
            self._probe_with([job], Overloaded(seconds))

    def _place(self, job: Job) -> float | None:
        """Settle where in the line a job goes; returns what `BatchPolicy.refuses` says of it."""
        now, policy = self._clock(), self._policy
        # The goal is one for predictions, and so is what is known of costs.
        is_prediction = job.group is Group.PREDICT
        if is_prediction and self._batching.max_latency:
            job.deadline = min(job.deadline, job.arrived + self._batching.max_latency)
        job.order = policy.order(job.arrived, job.deadline, job.priority)
        seconds = None
        if is_prediction:
            seconds = policy.refuses(now, job.order, job.deadline, self._queue, self._crew)
        if seconds is None:
            policy.arrived(now)
        return seconds

    def _probe_with(self, jobs: Sequence[Job], refusal: Overloaded) -> None:
        """Let the jobs of a request in that seem hopeless, where nobody suffers from it.

        Their first batch runs and teaches what it costs; the others do as far as that helps.

        Raises:
            Overloaded: The refusal: somebody would suffer, or there is little to learn.
        """
        now = self._clock()
        pause = min(_PROBE_SECONDS, self.costs.bound(1) / _PROBE_SHARE)
        is_fresh = now - max(self._learnt_at, self._probed_at) < pause
        if not self._idle or self._queue or is_fresh:
            self.refused += 1
            raise refusal
        self._probed_at = now
        order, deadline = jobs[0].order, jobs[0].deadline
        for place, job in enumerate(jobs):
            job.order, job.deadline = order, math.inf if place < self.size else deadline

    def put(self, job: Job) -> None:
        """Add a job to the queue, and send it off if that closes a batch."""
        self._queue.append(job)
        if self._idle:
            self._look_at(job)

    def put_together(self, jobs: Sequence[Job]) -> None:
        """Add the jobs of one request, all or none, and send off what that closes.

        The caller has asked for seats. Only when all of them are in line is anything sent, so that
        the first does not leave without the others.

        Raises:
            Overloaded: One of them could not be answered in time.
        """
        queue = self._queue
        try:
            for job in jobs:
                if (seconds := self._place(job)) is not None:
                    raise Overloaded(seconds)  # noqa: TRY301 - as of all of them, below
                queue.append(job)
            self._check_together(jobs)
        except Overloaded as refusal:
            for job in jobs:
                queue.discard(job)
            self._probe_with(jobs, refusal)
            for job in jobs:
                queue.append(job)
        if self._idle:
            self._look_at(jobs[0])

    def _check_together(self, jobs: Sequence[Job]) -> None:
        """Make sure that the last of a request's jobs is in time with all of the others.

        Of strangers ahead of a job some may yet be refused; of its companions all stay, or none.

        Raises:
            Overloaded: It is not.
        """
        if self._batching.keeps_deadlines:
            batches = math.ceil(len(jobs) / self.size / max(1, self._crew.size))
            seconds = batches * self.costs.bound(min(len(jobs), self.size))
            if self._clock() + seconds > jobs[-1].deadline:
                raise Overloaded(seconds)

    def _look_at(self, job: Job) -> None:
        """Send off what a job closes that has come while a worker is idle."""
        if self._window is None or len(self._queue) >= self._full or self._cannot_wait(job):
            self._dispatch()

    def _cannot_wait(self, job: Job) -> bool:
        """Whether a window that is open may be too long for a job that has come since."""
        return job.deadline < math.inf or self._queue.starts_with(job)

    def bring_back(self, jobs: Iterable[Job]) -> None:
        """Take jobs in again whose worker died; each will run by itself."""
        for job in jobs:
            self._queue.bring_back(job)
        if self._idle and self._queue:
            self._dispatch()

    # -- workers -----------------------------------------------------------------------------------

    def enlist(self, runner: BatchRunner) -> None:
        """Note that a worker is idle; it gets one batch, and is forgotten with it."""
        crew = self._crew
        crew.freed = self._clock()
        if (batch := crew.busy.pop(runner, None)) is not None:
            self._policy.answered(crew.freed, batch[1])
        self._idle.append(runner)
        crew.idle = len(self._idle)
        if self._queue:
            self._dispatch()

    def serve_least_in_hand_first(self) -> None:
        """Look at what workers have in hand before they are given more. Safe to call twice."""
        if not isinstance(self._idle, _LeastInHandFirst):
            self._idle = _LeastInHandFirst(self._idle)

    def answered(self, runner: BatchRunner) -> None:
        """Note that a worker is done with a batch, whether or not it asks for another."""
        crew = self._crew
        crew.freed = self._clock()
        if (batch := crew.busy.pop(runner, None)) is not None:
            self._policy.answered(crew.freed, batch[1])
        if self._idle and self._queue:  # that may change what the policy thinks of waiting
            self._dispatch()

    def goes_on(self, runner: BatchRunner, part: Batch) -> None:
        """Note that a worker is busy with a part of a batch, and not idle yet."""
        if runner in self._crew.busy:
            self._crew.busy[runner] = part.closed + part.predicted, len(part)

    def withdraw(self, runner: BatchRunner) -> None:
        """Take back `enlist`, and forget a worker that is busy."""
        self._crew.busy.pop(runner, None)
        if runner in self._idle:
            self._idle.remove(runner)
            self._crew.idle = len(self._idle)
            if not self._idle:
                self._close_window()

    def take(self, count: int, group: Group) -> Sequence[Job]:
        """Take up to ``count`` jobs now, for a worker that has some of their group already.

        None while the first in line belongs to another group, or must travel alone.
        """
        queue = self._queue
        if not queue or queue.first_group is not group or queue.first_travels_alone:
            return ()
        jobs = queue.pop(count)
        _note_dispatched(jobs, self._clock())
        return jobs

    def finished(self, batch: Batch, seconds: float, *, succeeded: bool) -> None:
        """Note what became of a batch; its jobs are answered in the same turn of the loop."""
        # What an explanation or a description takes says nothing of what a prediction does.
        if succeeded and batch.jobs[0].group is Group.PREDICT:
            self._learn_from(batch, seconds)
        self.history.add(batch, seconds, succeeded=succeeded)

    def handed_over(self, now: float) -> None:
        """An answer that has a deadline is going out to its client."""
        self._handed_over_at = now

    def _learn_from(self, batch: Batch, seconds: float) -> None:
        if self._batching.max_latency:
            handing_over = self._handed_over_at - self._finished_at
            if handing_over > 0.0:  # of the batch before
                self.costs.observe_handing_over(handing_over)
            self._finished_at = batch.closed + seconds
            self._punctuality.note(batch.jobs, self._finished_at + max(0.0, handing_over))
        # A few hundred lessons a second are plenty; where batches take no time, learning would.
        if batch.closed < self._learnt_at + _LESSON_SECONDS:
            return
        self._learnt_at = batch.closed
        self.costs.observe(batch.run_as, seconds)
        if not self.costs.samples % _BATCHES_LOOKED_AT:
            self._adjust()

    def out_of_memory(self, size: int, fits: int = 1) -> None:
        """A batch of this size needed more memory than there is: none so large for a while.

        Args:
            size: Rows that were too many.
            fits: Rows that are known not to be.
        """
        self._cap.exceeded(size, self._clock(), fits)
        self._adjust()

    # -- batches -----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send off whatever the policy lets go, to whoever has been idle longest."""
        queue = self._queue
        now = self._clock()
        held = now - self._window_opened if self._window is not None else 0.0
        self._close_window()
        while self._idle and queue:
            if queue.first_travels_alone:
                plan = _ALONE
            else:
                plan = self._policy.plan(now, queue, self._crew)
            if plan.shed:
                self._refuse(queue.drop(plan.shed))
            if plan.take:
                self._send(plan, now, held)
                held = 0.0
            elif not plan.shed:
                self._wait(plan, now, held)
                return

    def _send(self, plan: Plan, now: float, held: float) -> None:
        jobs: Sequence[Job] = self._queue.pop(plan.take)
        if len(jobs) > 1 and self._batching.keeps_deadlines:
            jobs = self._without_the_hopeless(jobs, now)
        if not jobs:
            return
        _note_dispatched(jobs, now)
        # By what really leaves, not by the plan: clients have left, or another group came next.
        run_as = len(jobs)
        if self._batching.compiled_sizes and jobs[0].group is not Group.DESCRIBE:
            run_as = self._batching.run_as(run_as)
        predicted = self.costs.mean(run_as)
        runner = self._idle.popleft()
        crew = self._crew
        crew.idle -= 1
        crew.busy[runner] = now + predicted, len(jobs)
        runner.run(Batch(jobs, now, plan.reason, run_as, predicted, held))

    def _wait(self, plan: Plan, now: float, held: float) -> None:
        self._full = plan.full
        # Whoever it was opened for may have left: the others were not held before they came.
        self._window_opened = max(now - held, self._queue.oldest_arrival)
        remaining = max(plan.until - now, _TIMER_SECONDS)
        self._window = self._loop.call_later(remaining, self._dispatch)

    def _without_the_hopeless(self, jobs: Sequence[Job], now: float) -> Sequence[Job]:
        """Refuse those of a batch who would be late in it, though its first is not.

        Where priorities differ, the first in line is not the one with the earliest deadline.
        """
        answered = now + self.costs.mean(self._batching.run_as(len(jobs)))
        late = {job for job in jobs if job.deadline < answered}
        if not late:
            return jobs
        self._refuse(late)
        return [job for job in jobs if job not in late]

    def _refuse(self, jobs: Iterable[Job]) -> None:
        """Answer those who cannot be in time; they may come again when the line is worked off."""
        batches = 1 + len(self._queue) // self.size
        seconds = batches * self.costs.bound(self.size) / max(1, self._crew.size)
        for job in jobs:
            self.refused += 1
            job.fail(Overloaded(seconds))

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None

    # -- bounds ------------------------------------------------------------------------------------

    def _adjust(self) -> None:
        """Settle the bounds that depend on what was learnt."""
        batching = self._batching
        if batching.is_automatic:
            self.choice = self._chosen()
        seats = self._seats(batching)
        self._queue.resize(seats, batching.seats)
        unknown = "learning" if batching.is_automatic and self.choice is None else ""
        bounds = [
            (batching.most, unknown),
            (seats, unknown),  # a full queue closes a batch: nobody else could join
            (self._cap.at(self._clock()), "a larger batch needed more memory than there is"),
        ]
        if self.choice is not None:
            bounds.insert(0, self.choice)
        if batching.policy == ADAPTIVE:
            pays = largest_that_pays(self._known_sizes(), self.costs)
            bounds.append((pays, "larger batches have less throughput"))
        size, self.why = min(bounds, key=itemgetter(0))
        self._policy.size = max(1, int(size))

    def _chosen(self) -> Choice | None:
        """The size that is worth it; None while too little is known.

        Traffic alone shows the sizes it needs. As long as the best is the largest of them, there
        may be a better one.
        """
        batching, sizes = self._batching, self._known_sizes()
        if not sizes or (sizes[0] > 1 and not batching.compiled_sizes):
            return None
        choice = knee(sizes, self.costs, batching.goal)
        is_enough = sizes[-1] >= min(_SIZE_TO_SEE, batching.most) and choice.size < sizes[-1]
        return choice if self._is_swept or is_enough else None

    def _known_sizes(self) -> list[int]:
        """Sizes that may run whose cost is known from more than a few batches, rising."""
        batching, has_seen = self._batching, self.costs.has_seen
        sizes = batching.compiled_sizes or [round(one.size) for one in self.costs.points]
        return [one for one in sizes if one <= batching.most and has_seen(one, _BATCHES_OF_A_SIZE)]

    def _seats(self, batching: Batching) -> int:
        """Seats in the queue: as was said; or, where a latency goal refuses in time, plenty."""
        if batching.is_queue_bounded or not batching.max_latency or not self.costs.is_known:
            return batching.queue_size
        return _MOST_SEATS


class _Punctuality:
    """Makes estimates more careful while too many answers come late, and bolder again.

    The distance to the mean is what is steered, never the size of batches by the delay: smaller
    batches mean less capacity, a longer queue, and smaller batches still.

    Args:
        costs: The estimates.
    """

    def __init__(self, costs: LatencyModel) -> None:
        self._costs = costs
        self._answers = 0
        self._late = 0

    def note(self, jobs: Sequence[Job], answered: float) -> None:
        """A batch was answered at this moment."""
        self._answers += len(jobs)
        for job in jobs:
            if job.deadline < answered:
                self._late += 1
        if self._late > _MOST_LATE * _ANSWERS_LOOKED_AT:
            self._costs.widen()
        elif self._answers >= _ANSWERS_LOOKED_AT:
            self._costs.narrow()
        else:
            return
        self._answers = self._late = 0


def _note_dispatched(jobs: Sequence[Job], now: float) -> None:
    for job in jobs:
        job.dispatched = now
