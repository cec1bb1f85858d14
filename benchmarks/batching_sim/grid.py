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
from contenders import COLD, CONTENDERS, FOR_MANY_WORKERS, LATE_GOAL, LONG_WINDOW, REFUSE_BY_MEAN
from engine import Contender, Simulation, Start
from optimum import fluid_bound, most_in_time
from outcome import Outcome
from profiles import ALL_PROFILES, GPU, PROFILES, Pause, Profile, Service, Slowdown
from workloads import MMPP3, POISSON, TRACE, WORKLOADS

OPTIMUM = "optimum"
ARRIVALS = (POISSON, MMPP3, TRACE)
#: From this request on a cold start is over.
SETTLED = 3000
_PROFILES = {profile.name: profile for profile in ALL_PROFILES}
_EVERYBODY = {
    contender.name: contender
    for contender in (*CONTENDERS, LONG_WINDOW, COLD, LATE_GOAL, REFUSE_BY_MEAN)
}
# So many goals all pauses of a run last together.
_PAUSED_GOALS = 20
# How many workers die in a run with outages, at most: one is missing half of the time at most.
_MAX_OUTAGES = 3


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
        first_seed: The others follow.
        pareto: See `Service`.
        pause: Length of a pause, in goals; there are fewer of the longer ones. 0: there are none.
        bimodal: See `Service`.
        slower: The factor of slowdowns.
        slowdowns: How many there are, each in the second half of an equal part of the run.
        slow_from: The share of the run after which it stays slower; 0: see `slowdowns`.
        outage: How long one of the workers is missing, in goals; up to three times a run.
        uncounted: How many come before those that count; then a goal that is set late is set.
    """

    profile: str
    arrivals: str
    load: float
    workers: int = 1
    noise: float = 0.0
    requests: int = 2000
    seeds: int = 3
    first_seed: int = 0
    pareto: float = 0.0
    pause: float = 0.0
    bimodal: float = 1.0
    slower: float = 1.0
    slowdowns: int = 1
    slow_from: float = 0.0
    outage: float = 0.0
    uncounted: int = 0

    @property
    def name(self) -> str:
        """How tables call it."""
        parts = [self.profile, self.arrivals, f"load {self.load:g}"]
        parts += [f"{self.workers} workers"] * (self.workers > 1)
        parts += [f"sigma {self.noise:g}"] * (self.noise > 0)
        parts += [f"Pareto {self.pareto:g}"] * (self.pareto > 0)
        parts += [f"pauses of {self.pause:g} goals"] * (self.pause > 0)
        parts += [f"a tenth takes {self.bimodal:g} times as long"] * (self.bimodal > 1)
        parts += [f"{self.slower:g} times slower, {self.slowdowns} times"] * (self.slower > 1)
        parts += [f"from {self.slow_from:g} of the run on"] * (self.slow_from > 0)
        parts += [f"outages of {self.outage:g} goals"] * (self.outage > 0)
        return ", ".join(parts)

    @property
    def all_seeds(self) -> range:
        """Those it is run with."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def model(self) -> Profile:
        """The profile itself."""
        return _PROFILES[self.profile]

    def outcome(self, contender: Contender, seed: int) -> Outcome:
        """Run it once."""
        moments = self.moments(seed)
        length = float(moments[-1])
        service = Service(
            self.model,
            self.noise,
            seed=seed,
            pareto=self.pareto,
            pauses=self.pauses(seed),
            slowdowns=self._slowdowns(length),
            bimodal=self.bimodal,
        )
        simulation = Simulation(contender, service, self.workers)
        for moment, seconds in self._outages(length):
            simulation.loop.call_at(moment, simulation.lose_worker, seconds)
        if contender.start is Start.LATE_GOAL:
            simulation.loop.call_at(float(moments[self.uncounted]), simulation.set_goal)
        outcome = simulation.run(OpenLoop(simulation.loop, self.model.goal, moments))
        return outcome.after(self.uncounted)

    def moments(self, seed: int) -> np.ndarray:
        """When the requests come."""
        rate = self.load * self.model.capacity(self.workers)
        return WORKLOADS[self.arrivals](rate, self.uncounted + self.requests, seed)

    def pauses(self, seed: int) -> list[Pause]:
        """When all workers stop: at random in equal parts of the run."""
        if not self.pause:
            return []
        count = max(1, round(_PAUSED_GOALS / self.pause))
        seconds = self.pause * self.model.goal
        part = max(self.moments(seed)[-1] / count, seconds)
        places = np.random.default_rng(seed).random(count) * (part - seconds)
        return [Pause(at * part + float(place), seconds) for at, place in enumerate(places)]

    def _slowdowns(self, length: float) -> list[Slowdown]:
        if self.slow_from:
            return [Slowdown(length * self.slow_from, self.slower)]
        part = length / self.slowdowns / 2
        starts = [(2 * number + 1) * part for number in range(self.slowdowns)]
        return [Slowdown(start, self.slower, part) for start in starts if self.slower > 1]

    def _outages(self, length: float) -> list[tuple[float, float]]:
        if not self.outage:
            return []
        seconds = self.outage * self.model.goal
        count = min(_MAX_OUTAGES, max(1, int(length / 2 / seconds)))
        return [((number + 0.5) * length / count, seconds) for number in range(count)]

    @property
    def _is_bounded(self) -> bool:
        has_even_costs = not (self.noise or self.pareto) and self.bimodal == 1
        return has_even_costs and self.slower == 1 and not self.outage

    def bound(self, seed: int, lost: int) -> float:
        """An upper bound of the goodput; not a number where costs are random or change.

        Args:
            seed: Of the arrivals.
            lost: How many requests some policy is known to lose.
        """
        if not self._is_bounded:
            return np.nan
        model, moments, pauses = self.model, self.moments(seed)[self.uncounted :], self.pauses(seed)
        if self.workers == 1:
            best = most_in_time(moments, model.goal, model.cost, model.size, lost, pauses)
        else:
            best = fluid_bound(moments, model.goal, model.cost, model.size, self.workers, pauses)
        return best / self.requests


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
        settled: Requests answered in time, of those after the first `SETTLED`.
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
    settled: float = np.nan

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
                item.after(SETTLED).goodput,
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


def run_all(
    cases: Iterable[tuple[Case, Sequence[str]]], processes: int | None = None
) -> list[Result]:
    """Run cases, each for the contenders of these names; on all cores if not on so many."""
    if processes == 1:
        return [run(case, names) for case, names in cases]
    context = get_context("fork")
    with context.Pool(processes or os.cpu_count()) as pool:
        return pool.starmap(run, cases, chunksize=1)


def run(case: Case, names: Sequence[str]) -> Result:
    """Run a case for some contenders; the optimum is a name, too, and comes last."""
    outcomes = {
        name: [case.outcome(_EVERYBODY[name], seed) for seed in case.all_seeds]
        for name in names
        if name != OPTIMUM
    }
    figures = {name: Figures.of(some) for name, some in outcomes.items()}
    if OPTIMUM in names:
        figures[OPTIMUM] = Figures(_best(case, outcomes))
    return Result(case, figures)


def _best(case: Case, outcomes: dict[str, list[Outcome]]) -> float:
    """The bound of a case; where there is none, the best goodput of any contender."""
    shares = []
    for at, seed in enumerate(case.all_seeds):
        lost = min(int((~some[at].good).sum()) for some in outcomes.values())
        shares.append(case.bound(seed, lost))
    best = float(np.mean(shares))
    known = max(np.mean([one.goodput for one in some]) for some in outcomes.values())
    return best if np.isfinite(best) else float(known)


def names_for(workers: int) -> tuple[str, ...]:
    """Everybody who is at home with so many workers."""
    everybody = CONTENDERS if workers == 1 else FOR_MANY_WORKERS
    return tuple(item.name for item in everybody)
