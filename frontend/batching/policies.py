"""When a batch closes: pure decisions, no clock but the moment that is passed in.

    FixedWindow      full, or its time is over: what TorchServe does
    Greedy           whatever is queued, at once
    FixedOrSingle    full, or its time is over and each goes by itself: OpenVINO's auto-batching
    Adaptive         by deadlines and learnt costs (`adaptive`)

A policy sees the queue and the state of the workers, and says how many jobs leave now. It is asked
when something has happened (a job came, a worker became idle, a window closed), never by polling.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Priority
from marserve.frontend.batching.latency_model import Costs, LatencyModel

#: How much longer than the class above it a class may wait.
AGING_SECONDS = 1.0


class Plan(NamedTuple):
    """What to do with the queue now.

    Attributes:
        take: How many jobs leave now; 0 means wait.
        shed: How many at its head are refused first: they cannot be in time.
        until: Moment to look again, if `full` jobs are not there sooner.
        full: Number of jobs that would make waiting pointless.
    """

    take: int
    reason: Reason
    shed: int = 0
    until: float = 0.0
    full: int = 0


@dataclass
class WorkerPoolState:
    """What the workers are doing.

    Attributes:
        idle: How many wait for a batch.
        last_idle_at: When the latest of them became idle.
        busy: For each batch in a worker, when it is expected to be done, and how many jobs it has.
    """

    idle: int = 0
    last_idle_at: float = -math.inf
    busy: dict[object, tuple[float, int]] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Jobs that workers hold."""
        return sum(jobs for _, jobs in self.busy.values())

    @property
    def size(self) -> int:
        """How many workers there are; one with several batches counts for each of them."""
        return self.idle + len(self.busy)

    def seconds_until_idle(self, now: float) -> float:
        """Seconds until one of them is idle."""
        if self.idle or not self.busy:
            return 0.0
        return max(0.0, min(self.busy.values())[0] - now)


@dataclass
class BatchPolicy(ABC):
    """Decides who is let in, in which order, and when a batch of up to ``size`` jobs closes.

    Here: whoever comes first.
    """

    size: int

    def order(self, arrived: float, deadline: float, priority: Priority) -> float:
        """Where in the queue a job goes: those with a smaller number leave first."""
        del deadline
        return arrived + priority * AGING_SECONDS

    def admit(
        self, now: float, order: float, deadline: float, queue: JobQueue, workers: WorkerPoolState
    ) -> float | None:
        """Let a job in that has just come; or the seconds after which another try may succeed."""
        del now, order, deadline, queue, workers
        return None

    def answered(self, now: float, jobs: int) -> None:  # noqa: B027 - most learn nothing from it
        """Note that a worker has answered so many jobs, and is idle."""

    @abstractmethod
    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """Decide for a queue of at least one job, for a worker that is free now."""


@dataclass
class FixedWindow(BatchPolicy):
    """TorchServe's window: a batch leaves when it is full or its time is over.

    It is counted from the arrival of the oldest, not from the moment a worker began to collect: so
    in TorchServe jobs which had waited behind a busy worker waited again. A delay of 0 takes what
    is there, up to the size; TorchServe's loop then stopped at two.

    Attributes:
        delay: Longest time the first waits for company, seconds.
        num_requests: How many requests the clients keep in flight, if that is known: when all of
            them are here, nobody else could join. 0 for unknown.
        costs: The window closes early for whoever would else be too late.
    """

    delay: float
    num_requests: int = 0
    costs: Costs = field(default_factory=LatencyModel)

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """See `BatchPolicy.plan`."""
        queued = len(queue)
        if queued >= self.size:
            return Plan(self.size, Reason.FULL)
        closes = queue.oldest_arrival + self.delay
        if (deadline := queue.earliest_deadline) < math.inf:
            closes = min(closes, deadline - self.costs.bound(1))
        if now >= closes:
            return Plan(queued, Reason.WINDOW)
        full = self.size
        if self.num_requests:
            full = min(full, max(1, self.num_requests - workers.in_flight))
            if queued >= full:
                return Plan(queued, Reason.NO_MORE_CLIENTS)
        return Plan(0, Reason.WINDOW, until=closes, full=full)


@dataclass
class FixedOrSingle(FixedWindow):
    """OpenVINO's rule: full batches, and when the time is over each request alone.

    For models whose batches have one size and nothing between it and 1.
    """

    #: Whoever had arrived by then goes alone: the window closed over all that were there.
    _singles_until: float = field(default=-math.inf, init=False)

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """See `BatchPolicy.plan`."""
        if len(queue) < self.size and queue.oldest_arrival <= self._singles_until:
            return Plan(1, Reason.SINGLE)
        plan = super().plan(now, queue, workers)
        if not plan.take or plan.reason is Reason.FULL:
            return plan
        self._singles_until = now
        return Plan(1, Reason.SINGLE)


@dataclass
class Greedy(BatchPolicy):
    """Whatever is queued, at once: a batch is what has arrived while another one ran."""

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """See `BatchPolicy.plan`."""
        del now, workers
        queued = len(queue)
        if queued >= self.size:
            return Plan(self.size, Reason.FULL)
        return Plan(queued, Reason.WORK_CONSERVING)
