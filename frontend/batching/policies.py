"""Batching policies decide when a batch is closed.

From the queue and the state of the workers, a policy decides how many jobs leave now, after each
event (a job arrived, a worker became idle, a window closed). Policies do not poll. A policy has no
clock and does no I/O. It keeps state between events, so each event is passed to it once, with its
time. `Adaptive` is in `adaptive.py`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Priority
from marserve.frontend.batching.learning.costs import Costs
from marserve.frontend.batching.learning.latency_model import LatencyModel

#: The most jobs that are refused in one iteration of the event loop; 500 take 1 to 10 ms.
MAX_SHED = 500
#: How much longer than a job of the next higher priority a job may wait.
AGING_SECONDS = 1.0


class Plan(NamedTuple):
    """How many jobs leave the queue now (``take``), and how many are refused before (``shed``).

    If none are taken, decide again at ``until``, or when ``full`` jobs are queued.
    """

    take: int
    reason: Reason
    shed: int = 0
    until: float = 0.0
    full: int = 0


@dataclass
class WorkerPoolState:
    """The workers of a model version.

    ``busy`` has the expected end of each batch in a worker, and the number of its jobs.
    """

    idle: int = 0
    last_idle_at: float = -math.inf
    busy: dict[object, tuple[float, int]] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Number of jobs in workers."""
        return sum(jobs for _, jobs in self.busy.values())

    @property
    def size(self) -> int:
        """Number of workers; one with several batches counts for each of them."""
        return self.idle + len(self.busy)

    def seconds_until_idle(self, now: float) -> float:
        """Return the expected seconds until a worker is idle."""
        if self.idle or not self.busy:
            return 0.0
        return max(0.0, min(self.busy.values())[0] - now)


@dataclass
class BatchPolicy(ABC):
    """Decides which jobs are admitted, in which order, and when a batch of up to ``size`` closes.

    This base class admits all jobs, in the order of their arrival. ``max_shed`` is the most jobs
    that one plan may refuse.
    """

    size: int
    max_shed: int = field(default=MAX_SHED, init=False)

    def promote(self, arrived: float, priority: Priority) -> Priority:
        """Return the priority by which a new job is sorted under a latency goal."""
        del arrived
        return priority

    def order(self, arrived: float, deadline: float, priority: Priority) -> float:
        """Return the sort key of a job in the queue: smaller ones leave first. No side effects."""
        del deadline
        return arrived + priority * AGING_SECONDS

    def admit(
        self, now: float, deadline: float, queue: JobQueue, workers: WorkerPoolState
    ) -> float | None:
        """Return None to admit a new job; else the seconds after which a retry may succeed."""
        del now, deadline, queue, workers
        return None

    def answered(self, now: float, jobs: int) -> None:  # noqa: B027 - most policies ignore it
        """Note that a worker has finished a batch of this many jobs."""

    @abstractmethod
    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """Decide which jobs of a queue that is not empty an idle worker gets."""


@dataclass
class FixedWindow(BatchPolicy):
    """Closes a batch when it is full or its window is over, as TorchServe does.

    The window starts with the arrival of the oldest job. In TorchServe it starts when a worker
    becomes idle, so that jobs which have waited behind a busy worker wait again. A delay of 0 takes
    all queued jobs, up to the size; TorchServe's loop stops at two.
    """

    delay: float  # the window in seconds
    num_requests: int = 0  # that the clients keep in flight; 0 for unknown
    #: Close the window early for a job that would be late otherwise.
    costs: Costs = field(default_factory=LatencyModel)
    #: Whether a list of a client closes the window. All its rows are queued at once, so waiting
    #: would only add rows of other requests, and delay its answer.
    lists_close: bool = False

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """Take a full batch, or all jobs when the window is over."""
        queued = queue.sharing_count
        if queued >= self.size:
            return Plan(self.size, Reason.FULL)
        if self.lists_close and queue.has_rows_of_lists:
            return Plan(queued, Reason.LIST)
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
    """Forms full batches; when the window is over, each job runs alone, as in OpenVINO.

    For models that run only at one batch size and at 1.
    """

    #: Jobs that arrived until then run alone: their window is over.
    _singles_until: float = field(default=-math.inf, init=False)

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """Take a full batch, or one job when the window is over."""
        if queue.sharing_count < self.size and queue.oldest_arrival <= self._singles_until:
            return Plan(1, Reason.SINGLE)
        plan = super().plan(now, queue, workers)
        if not plan.take or plan.reason is Reason.FULL:
            return plan
        self._singles_until = now
        return Plan(1, Reason.SINGLE)


@dataclass
class Greedy(BatchPolicy):
    """Takes all queued jobs at once: those that arrived while the previous batch ran."""

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """Take all jobs, up to the size."""
        del now, workers
        queued = queue.sharing_count
        if queued >= self.size:
            return Plan(self.size, Reason.FULL)
        return Plan(queued, Reason.WORK_CONSERVING)
