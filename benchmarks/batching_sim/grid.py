"""The grid of cases that everybody goes through, and what came out of it.

A case is a profile, a kind of arrivals, a load and a number of workers; it is run with several
seeds, the same for all contenders, and its figures are means over them.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
from clients import OpenLoop
from contenders import CONTENDERS, FOR_MANY_WORKERS, LONG_WINDOW
from engine import Contender, Simulation
from optimum import most_in_time
from outcome import Outcome
from profiles import GPU, PROFILES, Profile, Service
from workloads import MMPP3, POISSON, TRACE, WORKLOADS

OPTIMUM = "optimum"
ARRIVALS = (POISSON, MMPP3, TRACE)
_PROFILES = {profile.name: profile for profile in PROFILES}
_EVERYBODY = {contender.name: contender for contender in (*CONTENDERS, LONG_WINDOW)}


@dataclass(frozen=True)
class Case:
    """What is simulated.

    Attributes:
        profile: Name of the profile.
        arrivals: Name of the workload.
        load: Mean rate, as a share of what full batches could serve.
        workers: How many.
        noise: See `Service`.
        requests: How many, for each seed.
        seeds: How many.
    """

    profile: str
    arrivals: str
    load: float
    workers: int = 1
    noise: float = 0.0
    requests: int = 2000
    seeds: int = 3

    @property
    def model(self) -> Profile:
        """The profile itself."""
        return _PROFILES[self.profile]

    def outcome(self, contender: Contender, seed: int) -> Outcome:
        """Run it once."""
        service = Service(self.model, self.noise, seed=seed)
        simulation = Simulation(contender, service, self.workers)
        return simulation.run(OpenLoop(simulation.loop, self.model.goal, self.moments(seed)))

    def moments(self, seed: int) -> np.ndarray:
        """When the requests come."""
        rate = self.load * self.model.capacity(self.workers)
        return WORKLOADS[self.arrivals](rate, self.requests, seed)


@dataclass(frozen=True)
class Figures:
    """Means over the seeds of a case. Shares from 0 to 1, times in seconds.

    Attributes:
        goodput: Requests answered in time.
        late: Answers that came too late, of all answers.
        turned_away: Requests refused, at the door or later.
        latency: Mean of all answers.
        p99: 99th percentile of all answers.
        good_mean: Mean of the answers in time.
        good_median: Their median.
        good_p99: Their 99th percentile.
        batch_size: Mean.
    """

    goodput: float
    late: float = 0.0
    turned_away: float = 0.0
    latency: float = np.nan
    p99: float = np.nan
    good_mean: float = np.nan
    good_median: float = np.nan
    good_p99: float = np.nan
    batch_size: float = np.nan

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Figures":
        """The means."""
        rows = [
            (
                item.goodput,
                item.late,
                item.turned_away,
                item.mean_latency,
                item.latency_p99,
                item.good_latency(),
                item.good_latency(50),
                item.good_latency(99),
                item.batch_size,
            )
            for item in outcomes
        ]
        return cls(*np.mean(rows, axis=0).tolist())


@dataclass(frozen=True)
class Result:
    """What everybody made of a case.

    Attributes:
        case: The case.
        figures: By name of the contender; the optimum has nothing but a goodput.
    """

    case: Case
    figures: dict[str, Figures]

    def regret(self, name: str) -> float:
        """Goodput that somebody lacks to the optimum."""
        return self.figures[OPTIMUM].goodput - self.figures[name].goodput


def single_worker(requests: int, seeds: int) -> list[Case]:
    """The grid of 60 cases for which the optimum is known."""
    return [
        Case(profile.name, arrivals, load, requests=requests, seeds=seeds)
        for profile in PROFILES
        for arrivals in ARRIVALS
        for load in (0.1, 0.5, 0.8, 0.95, 1.2)
    ]


def several_workers(requests: int, seeds: int) -> list[Case]:
    """The same for four workers."""
    return [
        Case(profile.name, arrivals, load, workers=4, requests=requests, seeds=seeds)
        for profile in PROFILES
        for arrivals in ARRIVALS
        for load in (0.1, 0.5, 0.8, 0.95, 1.1)
    ]


def curves(requests: int) -> list[Case]:
    """The GPU at many loads, with even and with bursty arrivals."""
    return [
        Case(GPU.name, arrivals, tenths / 10, requests=requests, seeds=1)
        for arrivals in (POISSON, MMPP3)
        for tenths in range(1, 14)
    ]


def run_all(cases: Iterable[tuple[Case, Sequence[str]]]) -> list[Result]:
    """Run cases, each for the contenders of these names, on as many cores as there are."""
    context = get_context("fork")
    with context.Pool(os.cpu_count()) as pool:
        return pool.starmap(run, cases, chunksize=1)


def run(case: Case, names: Sequence[str]) -> Result:
    """Run a case for some contenders; the optimum is a name, too, and comes last."""
    outcomes = {
        name: [case.outcome(_EVERYBODY[name], seed) for seed in range(case.seeds)]
        for name in names
        if name != OPTIMUM
    }
    figures = {name: Figures.of(some) for name, some in outcomes.items()}
    if OPTIMUM in names:
        figures[OPTIMUM] = Figures(_best(case, outcomes))
    return Result(case, figures)


def _best(case: Case, outcomes: dict[str, list[Outcome]]) -> float:
    shares = []
    for seed in range(case.seeds):
        lost = min(int((~some[seed].good).sum()) for some in outcomes.values())
        model = case.model
        best = most_in_time(case.moments(seed), model.goal, model.cost, model.size, lost)
        shares.append(best / case.requests)
    return float(np.mean(shares))


def names_for(workers: int) -> tuple[str, ...]:
    """Everybody who is at home with so many workers."""
    everybody = CONTENDERS if workers == 1 else FOR_MANY_WORKERS
    return tuple(item.name for item in everybody)
