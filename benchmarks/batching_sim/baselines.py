"""What other servers do, as policies that the production batcher can drive.

Own words for what is published of each, or was read in its source; none of their code.
Two of them learn from their own batches, and see what became of each (`Learner`).
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.learning.costs import Costs
from marserve.frontend.batching.policies import Greedy, Plan, WorkerPoolState


class Learner(Protocol):
    """A policy that looks at what became of its batches."""

    def observed(self, batch: Batch, seconds: float) -> None:
        """Note that a batch took so many seconds."""


@dataclass
class WindowFromPoll(Greedy):
    """TorchServe: the window opens when a worker begins to collect, one worker at a time.

    A request that has waited behind a busy worker waits a full window again, unless the batch is
    full. The queue is bounded (by 100), and nobody's age is looked at.

    Args:
        delay: Length of the window, seconds (``maxBatchDelay``).
    """

    delay: float = 0.0
    _opened: float | None = field(default=None, init=False)

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """See `BatchPolicy.plan`."""
        if self._opened is None:
            self._opened = now
        closes = self._opened + self.delay
        if len(queue) < self.size and now < closes:
            return Plan(0, Reason.WINDOW, until=closes, full=self.size)
        self._opened = None
        return super().plan(now, queue, workers)


@dataclass
class TakeLiving(Greedy):
    """Clipper and mosec: whatever waits, but for what has expired already."""

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """See `BatchPolicy.plan`."""
        del workers
        queued, expired = len(queue), 0
        while expired < queued and queue.deadline_at(expired) <= now:
            expired += 1
        take = min(queued - expired, self.size)
        return Plan(take, Reason.WORK_CONSERVING, shed=expired)


@dataclass
class RefuseByMean(Greedy):
    """Admission that refuses by the mean cost up to a batch ahead, and by the high estimate beyond.

    Heads that the next batch would not answer in time, by the mean, are refused as well.

    Args:
        costs: What batches take, learnt by the production's model.
    """

    costs: Costs = field(kw_only=True)

    def admit(
        self, now: float, deadline: float, queue: JobQueue, workers: WorkerPoolState
    ) -> float | None:
        """See `BatchPolicy.admit`."""
        if not self.costs.is_known:
            return None
        batches = len(queue) // self.size
        cost = self.costs.bound if batches else self.costs.mean
        wait = workers.seconds_until_idle(now)
        seconds = wait + cost(1) + batches * cost(self.size) / 2 / max(1, workers.size)
        return seconds if now + seconds > deadline else None

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """See `BatchPolicy.plan`."""
        del workers
        queued, shed, cost = len(queue), 0, self.costs.mean
        while shed < queued:
            if now + cost(min(queued - shed, self.size)) <= queue.deadline_at(shed):
                break
            shed += 1
        return Plan(min(queued - shed, self.size), Reason.WORK_CONSERVING, shed=shed)


@dataclass
class Aimd(Greedy):
    """Clipper's cap: one more while batches keep to the goal, a tenth less when one does not.

    Args:
        goal: Seconds that a batch may take.
    """

    goal: float = 0.0
    _cap: float = field(default=1.0, init=False)

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """See `BatchPolicy.plan`."""
        del now, workers
        return Plan(min(len(queue), int(self._cap)), Reason.WORK_CONSERVING)

    def observed(self, batch: Batch, seconds: float) -> None:
        """See `Learner`."""
        if seconds > self.goal:
            self._cap = max(1.0, self._cap * 0.9)
        elif len(batch) >= int(self._cap):
            self._cap = min(float(self.size), self._cap + 1.0)


@dataclass
class Cork(Greedy):
    """BentoML's dispatcher: a line fitted to the last 50 batches, looked at every millisecond.

    It holds while one more request would cost those that wait less than the wait it is used to, and
    refuses the head as long as the *whole* queue as one batch would make it late. One batch is in
    flight. It knows its line from the start: BentoML learns it from the first 14 requests, most of
    them one by one, which would weigh too much in a short run.

    Args:
        goal: Seconds from arrival to answer (``max_latency_ms``).
        alpha: Seconds for each request of a batch, as learnt so far.
        beta: Seconds for the batch itself.
    """

    goal: float = math.inf
    alpha: float = 0.0
    beta: float = 0.0
    _usual_wait: float = field(default=0.0, init=False)
    _refreshed: float = field(default=0.0, init=False)
    _kept: deque[tuple[int, float, float]] = field(
        default_factory=lambda: deque(maxlen=50), init=False
    )

    _TICK = 0.001
    _REFRESH_SECONDS = 5.0

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """See `BatchPolicy.plan`."""
        del workers
        shed = self._hopeless(now, queue)
        queued = len(queue) - shed
        youngest = now - self._arrival(queue, len(queue) - 1)
        price = queued * (youngest + self._TICK + self.alpha)
        if queued < self.size and price <= 0.95 * self._usual_wait:
            until = now + self._TICK
            return Plan(0, Reason.WINDOW, shed=shed, until=until, full=self.size)
        return Plan(min(queued, self.size), Reason.WORK_CONSERVING, shed=shed)

    def observed(self, batch: Batch, seconds: float) -> None:
        """See `Learner`."""
        self._kept.append((len(batch), seconds, batch.closed - batch.jobs[0].arrived))
        now = batch.closed + seconds
        if now - self._refreshed >= self._REFRESH_SECONDS:
            self._refreshed = now
            self._fit()

    def _hopeless(self, now: float, queue: JobQueue) -> int:
        """How many heads are refused, until the queue as one batch suits the next."""
        queued, shed = len(queue), 0
        while queued - shed > 1:
            waited = now - self._arrival(queue, shed)
            if waited + self.alpha * (queued - shed) + self.beta < self.goal:
                break
            shed += 1
        return shed

    def _arrival(self, queue: JobQueue, index: int) -> float:
        return queue.deadline_at(index) - self.goal

    def _fit(self) -> None:
        sizes, seconds, waits = np.array(self._kept).T
        table = np.stack([sizes, np.ones_like(sizes)], axis=1)
        alpha, beta = np.linalg.lstsq(table, seconds, rcond=None)[0]
        self.alpha, self.beta = max(1e-6, float(alpha)), max(0.0, float(beta))
        self._usual_wait = max(0.0, float(waits.mean()))
