"""Collects jobs for idle workers until the policy says go.

An idle worker enlists, nothing is pushed at a busy one: order, backpressure and the choice of a
free worker need no code. It is driven by events alone (a job came, a worker became idle, a window
closed), and hands a batch over within the event that closed it. A task per worker that awaits its
next batch reads a little better, but costs two more turns of the loop per batch, and a batch that
was handed to a waiter which is cancelled in the same turn would have to be found again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.jobs import Group, Job, JobQueue
from marserve.frontend.batching.policies import BatchPolicy
from marserve.frontend.errors import ServeError

Clock = Callable[[], float]

# What uvloop rounds its timers to; asked for less, it would turn round and round till time is up.
_TIMER_SECONDS = 0.001


class Batch:
    """Jobs that travel together, in order.

    Args:
        jobs: At least one.
        closed: Moment the batch was closed, seconds on the monotonic clock.
    """

    __slots__ = ("closed", "jobs")

    def __init__(self, jobs: Sequence[Job], closed: float) -> None:
        self.jobs = jobs
        self.closed = closed

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def inputs(self) -> list[Input]:
        """What the worker gets."""
        return [job.input for job in self.jobs]

    def deliver(self, predictions: Sequence[Prediction]) -> None:
        """Answer each job with its prediction; as many predictions as jobs."""
        for job, prediction in zip(self.jobs, predictions, strict=True):
            job.resolve(prediction)

    def push(self, places: Sequence[int], pieces: Sequence[Prediction]) -> None:
        """Give the jobs at these places a piece of their answer."""
        for place, piece in zip(places, pieces, strict=True):
            self.jobs[place].push(piece)

    def fail(self, error: ServeError) -> None:
        """Answer every job with the same failure."""
        for job in self.jobs:
            job.fail(error)


class BatchRunner(Protocol):
    """A worker, as the batcher sees it."""

    def run(self, batch: Batch) -> None:
        """Begin to work on a batch; returns at once and never raises."""


class Batcher:
    """Turns the queue of one model version into batches for its workers.

    Args:
        queue: Where the jobs wait.
        policy: When a batch closes.
        loop: Rings when a window closes.
        clock: Tells the time, in seconds. Not the loop's own: uvloop's counts milliseconds.
    """

    def __init__(
        self,
        queue: JobQueue,
        policy: BatchPolicy,
        loop: asyncio.AbstractEventLoop,
        clock: Clock = time.monotonic,
    ) -> None:
        self._queue = queue
        self._policy = policy
        self._loop = loop
        self._clock = clock
        self._idle: deque[BatchRunner] = deque()
        self._window: asyncio.TimerHandle | None = None
        self._full = 0

    def put(self, job: Job) -> None:
        """Add a job to the queue, and send it off if that closes a batch."""
        self._queue.append(job)
        if self._idle and (self._window is None or len(self._queue) >= self._full):
            self._dispatch()

    def enlist(self, runner: BatchRunner) -> None:
        """Note that a worker is idle; it gets one batch, and is forgotten with it."""
        self._idle.append(runner)
        if self._queue:
            self._dispatch()

    def withdraw(self, runner: BatchRunner) -> None:
        """Take back `enlist`; nothing if the worker is not idle."""
        if runner in self._idle:
            self._idle.remove(runner)

    @property
    def idle(self) -> int:
        """Workers that wait for a batch."""
        return len(self._idle)

    def take(self, count: int, group: Group) -> Sequence[Job]:
        """Take up to ``count`` jobs now, for a worker that has some of their group already.

        None while the first in line belongs to another group.
        """
        if not self._queue or self._queue.first_group is not group:
            return ()
        return _closed(self._queue.pop(count), self._clock()).jobs

    def _dispatch(self) -> None:
        """Send off whatever the policy lets go, to whoever has been idle longest."""
        self._close_window()
        while self._idle and self._queue:
            now = self._clock()
            take = 1
            if self._queue.first_group is not Group.DESCRIBE:
                plan = self._policy.plan(now, len(self._queue), self._queue.oldest_arrival)
                take = plan.take
            if not take:
                self._full = plan.full
                remaining = max(plan.until - now, _TIMER_SECONDS)
                self._window = self._loop.call_later(remaining, self._dispatch)
                return
            jobs = self._queue.pop(take)
            if jobs:
                self._idle.popleft().run(_closed(jobs, now))

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None


def _closed(jobs: Sequence[Job], now: float) -> Batch:
    """The batch of jobs that leave the queue now."""
    for job in jobs:
        job.dispatched = now
    return Batch(jobs, now)
