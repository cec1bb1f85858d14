"""Single stories beside the grid: steps, drifts, closed loops, and how fast decisions are."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from clients import Clients, ClosedLoop, OpenLoop, Request
from contenders import ADAPTIVE, CONTENDERS, SHORT_WINDOW, TORCHSERVE, with_known_clients
from engine import Contender, Simulation, sweep
from outcome import Outcome
from profiles import GPU, Service, Slowdown
from virtual_time import VirtualLoop
from workloads import poisson, steps

from marserve.backend.protocol import Input
from marserve.frontend.batching.adaptive import Adaptive
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Job
from marserve.frontend.batching.learning.latency_model import LatencyModel
from marserve.frontend.batching.policies import WorkerPoolState

# All is well again when so many requests in a row have this share of good ones.
_STRETCH = 100
_WELL = 0.95
# The load step: shares of the capacity, each for so many seconds.
STEP_LOADS, STEP_SECONDS = (0.2, 1.5, 0.2), (1.0, 1.0, 2.0)
_DRIFT_LOAD, _DRIFT, _DRIFT_SECONDS = 0.4, 2.0, 4.0
CLIENTS = (1, 2, 4, 8, 16, 64)


@dataclass(frozen=True)
class Story:
    """What one contender made of one story.

    Attributes:
        name: Of the contender.
        outcome: What became of the requests.
        recovery: Seconds from the change until all was well again; infinite for never.
    """

    name: str
    outcome: Outcome
    recovery: float = math.nan


def load_step() -> list[Story]:
    """The load rises from 0.2 to 1.5 and falls back; recovery counts from the fall."""
    rates = [load * GPU.capacity() for load in STEP_LOADS]
    arrivals = steps(rates, STEP_SECONDS, seed=0)
    return [
        _story(contender, Service(GPU), arrivals, STEP_SECONDS[0] + STEP_SECONDS[1])
        for contender in CONTENDERS
    ]


def cost_drift() -> list[Story]:
    """All batches take twice as long from the middle on; recovery counts from there."""
    rate = _DRIFT_LOAD * GPU.capacity()
    arrivals = poisson(rate, int(2 * _DRIFT_SECONDS * rate), seed=0)
    return [
        _story(
            contender,
            Service(GPU, slowdowns=[Slowdown(_DRIFT_SECONDS, _DRIFT)]),
            arrivals,
            _DRIFT_SECONDS,
        )
        for contender in CONTENDERS
    ]


def _story(contender: Contender, service: Service, arrivals: np.ndarray, change: float) -> Story:
    simulation = Simulation(contender, service)
    outcome = simulation.run(OpenLoop(simulation.loop, service.profile.goal, arrivals))
    return Story(contender.name, outcome, recovery(outcome, change))


def recovery(outcome: Outcome, change: float) -> float:
    """Seconds from a change until a stretch of requests begins that are nearly all good."""
    after = outcome.arrived >= change
    good, arrived = outcome.good[after], outcome.arrived[after]
    if len(good) < _STRETCH:
        return math.inf
    shares = np.convolve(good, np.ones(_STRETCH) / _STRETCH, mode="valid")
    well = np.flatnonzero(shares >= _WELL)
    return float(arrived[well[0]] - change) if len(well) else math.inf


def closed_loop(clients: int, requests: int) -> list[Story]:
    """Clients that send their next request when the last one is answered."""
    stories = []
    for contender in (SHORT_WINDOW, TORCHSERVE, ADAPTIVE, with_known_clients(clients)):
        simulation = Simulation(contender, Service(GPU))
        loop = ClosedLoop(simulation.loop, GPU.goal, clients, requests)
        stories.append(Story(contender.name, simulation.run(loop)))
    return stories


def decisions_per_second(count: int, tries: int = 5) -> tuple[float, float]:
    """How often a second the production's policy can look at a crowded line.

    Returns:
        Decisions on what leaves, of the longest kind (whether several workers gain by holding it
        back); and decisions on who is let in.
    """
    line, costs = JobQueue(GPU.size), LatencyModel()
    costs.seed(sweep(Service(GPU)))
    policy = Adaptive(GPU.size, costs, GPU.goal)
    clients = Clients(VirtualLoop(), GPU.goal)
    for arrived in np.linspace(0.0, 0.01, GPU.size // 2).tolist():
        request = Request(arrived, clients)
        job = Job(Input("", {}, []), arrived, request.on_answer, deadline=request.deadline)
        job.order = policy.order(arrived, job.deadline, job.priority)
        line.append(job)
    workers = WorkerPoolState(idle=1, busy=dict.fromkeys(range(3), (0.02, 1)))
    last = job
    return (
        _best_rate(lambda: policy.plan(0.01, line, workers), count, tries),
        _best_rate(lambda: policy.admit(0.01, last.deadline, line, workers), count, tries),
    )


def speed_of_decisions(rounds: int = 30) -> tuple[float, float]:
    """`decisions_per_second` as shares of the speed of some Python that never changes.

    So that figures of several machines, or of one that is busy, can be compared.
    """
    rates = [(*decisions_per_second(1000, 1), _best_rate(_python, 1000, 1)) for _ in range(rounds)]
    plans, admissions, python = np.max(rates, axis=0)
    return float(plans / python), float(admissions / python)


def _python() -> None:
    heap: list[tuple[float, int]] = []
    for number in range(20):
        heappush(heap, (number * 0.37 % 1.0, number))
    while heap:
        heappop(heap)


def _best_rate(call: Callable[[], object], count: int, tries: int) -> float:
    """Calls per second, the best of some tries: what else the machine does is no matter here."""
    rates = []
    for _ in range(tries):
        begun = time.perf_counter()
        for _ in range(count):
            call()
        rates.append(count / (time.perf_counter() - begun))
    return max(rates)
