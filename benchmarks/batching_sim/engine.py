"""A discrete-event simulation around the production batcher: virtual time, clients, workers.

The batcher, its queue, the policy and the learnt costs are the very classes that serve; only the
loop that rings, the clock, the workers and the clients are imagined.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from clients import LEAST_RETRY_SECONDS, Clients, Request
from outcome import Outcome
from profiles import Profile, Service
from virtual_time import VirtualLoop

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Job, Priority
from marserve.frontend.batching.learning.costs import Costs
from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.policies import BatchPolicy
from marserve.frontend.configuration.model_schema import GREEDY
from marserve.frontend.errors import Overloaded

_INPUT = Input("", {}, [])
_PREDICTION = Prediction(b"")
# What a sweep at load runs of each size; the median counts.
_SWEEP_RUNS = 3


@dataclass(frozen=True)
class Foreign(Batching):
    """Settings that make a policy which the production does not have.

    Attributes:
        foreign: Makes the policy, from the learnt costs.
        observed: Told of each batch and the seconds it took, if the policy learns by itself.
    """

    foreign: Callable[[Costs], BatchPolicy] | None = None
    observed: Callable[[Batch, float], None] | None = None

    def make_policy(self, costs: Costs) -> BatchPolicy:
        """See `Batching.make_policy`."""
        return self.foreign(costs) if self.foreign else super().make_policy(costs)


class Start(Enum):
    """What is known of the costs when the first request comes."""

    WARM = "swept"
    COLD = "never run"
    LATE_GOAL = "has served without a goal"


@dataclass(frozen=True)
class Contender:
    """A policy to be simulated.

    Attributes:
        name: How the tables call it.
        batching: Its settings for a profile.
        sees_deadlines: Whether its jobs have deadlines; else nothing is ever refused early.
        start: What it knows of the costs.
    """

    name: str
    batching: Callable[[Profile], Batching]
    sees_deadlines: bool = False
    start: Start = Start.WARM


class Worker:
    """Runs a batch for as long as it takes.

    Args:
        simulation: Where it works.

    Attributes:
        batch: The running batch; None without one.
        is_dead: Whether it has died; the end of its batch is not reported.
    """

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self.outstanding = 0
        self.batch: Batch | None = None
        self.is_dead = False

    def run(self, batch: Batch) -> None:
        """See `batcher.BatchRunner`."""
        self.batch = batch
        loop = self._simulation.loop
        seconds = self._simulation.seconds_of(batch)
        loop.call_later(seconds, self._finish, batch, seconds)

    def _finish(self, batch: Batch, seconds: float) -> None:
        if not self.is_dead:
            self.batch = None
            self._simulation.finished(self, batch, seconds)


class Simulation:
    """One policy under one load.

    Args:
        contender: The policy.
        service: What batches really take.
        workers: How many there are; each runs one batch at a time.
        loop: Tells the time, of several that run side by side.
    """

    def __init__(
        self,
        contender: Contender,
        service: Service,
        workers: int = 1,
        loop: VirtualLoop | None = None,
    ) -> None:
        self.loop = loop or VirtualLoop()
        self.service = service
        self.sizes: list[int] = []
        self.busy = 0.0
        self._batching = batching = contender.batching(service.profile)
        self._sees_deadlines = contender.sees_deadlines
        if contender.start is Start.LATE_GOAL:
            self._sees_deadlines = False
            batching = Batching(policy=GREEDY, size=batching.size, queue_size=batching.queue_size)
        self._queue = JobQueue(batching.queue_size)
        self._batcher = Batcher(self._queue, batching, self.loop, self.loop.time)
        costs = sweep(service)  # even where it is not used: the noise to come is that of all others
        if contender.start is Start.WARM:
            self._batcher.seed(costs)
        self._observed = getattr(batching, "observed", None)
        self._workers = [Worker(self) for _ in range(workers)]
        for worker in self._workers:
            self._batcher.mark_idle(worker)

    def run(self, clients: Clients) -> "Outcome":
        """Serve the clients until all have their answers."""
        clients.send = self.send
        clients.start()
        self.loop.run()
        return Outcome.of(clients.requests, self.sizes, self.busy)

    def set_goal(self) -> None:
        """Use the settings of the contender from now on, which has served without a goal."""
        self._sees_deadlines = True
        self._batcher.reconfigure(self._batching)

    def lose_worker(self, seconds: float) -> None:
        """End a worker, as the server does; start another one after these seconds."""
        worker = self._workers.pop(0)
        worker.is_dead = True
        self._batcher.remove(worker, [worker.batch] if worker.batch else [])
        again = [job for job in worker.batch.jobs if job.is_open] if worker.batch else []
        for job in again:
            job.crashes += 1
        self._batcher.requeue(again)
        self.loop.call_later(seconds, self._add_worker)

    def _add_worker(self) -> None:
        self._workers.append(Worker(self))
        self._batcher.mark_idle(self._workers[-1])

    def finished(self, worker: Worker, batch: Batch, seconds: float) -> None:
        """A worker is done with a batch, as the production's workers tell it."""
        self.sizes.append(len(batch))
        self.busy += seconds
        if self._observed is not None:
            self._observed(batch, seconds)
        for job in batch.jobs:
            job.resolve(_PREDICTION)
        self._batcher.record(batch, seconds, succeeded=True)
        self._batcher.mark_idle(worker, batch)

    def seconds_of(self, batch: Batch) -> float:
        """What a batch takes that starts now."""
        return self.service.seconds(batch.run_as, self.loop.now)

    def input_of(self, request: Request) -> Input:  # noqa: ARG002 - here all are alike
        """What a request brings."""
        return _INPUT

    @property
    def in_flight(self) -> int:
        """Requests that were sent here and are not answered."""
        return len(self._queue) + self._batcher.workers.in_flight

    @property
    def expected_seconds(self) -> float:
        """How long a request that came now would take, as the server itself expects."""
        return self._batcher.deadline_admission.expected_seconds()

    @property
    def share_taken(self) -> float:
        """The share of the places to wait that are taken."""
        return self._queue.share_taken(Priority.NORMAL)

    def send(self, request: Request) -> float | None:
        """Queue a request; returns the seconds after which to come again if it is refused."""
        deadline = request.deadline if self._sees_deadlines else math.inf
        job = Job(self.input_of(request), request.arrived, request.on_answer, deadline=deadline)
        if not self._queue.has_capacity(job.priority):
            return LEAST_RETRY_SECONDS
        try:
            self._batcher.put(job)
        except Overloaded as refusal:
            return refusal.retry_after
        return None


def sweep(service: Service) -> list[tuple[int, float]]:
    """What a sweep at load tells: the median of some runs of 1, 2, 4, … and the largest size."""
    sizes = {1 << power for power in range(service.profile.size.bit_length())}
    return [
        (size, float(np.median([service.seconds(size) for _ in range(_SWEEP_RUNS)])))
        for size in sorted({*sizes, service.profile.size})
    ]
