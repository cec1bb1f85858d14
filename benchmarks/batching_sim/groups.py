"""Groups of cases beside the grid: where costs are noisy, unknown, not a line, or interrupted.

Each is run by everybody who is at home there; the adaptive policy twice, with its costs swept
before the first request (warm) and never measured (cold).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from contenders import (
    ADAPTIVE,
    COLD,
    CORK,
    LATE_GOAL,
    REFUSE_BY_MEAN,
    TAKE_ALL,
    TAKE_LIVING,
    TORCHSERVE,
)
from grid import OPTIMUM, SETTLED, Case, single_worker
from profiles import CLIFFS, CONVEX, CPU, FLAT, GPU, PROFILES, SLOW, TIGHT, Profile
from workloads import FLASH, GENERATED, MMPP3, MMPP10, ON_OFF, POISSON, TRACE

#: Policies are tuned on seeds below 100; what is reported comes from others.
FIRST_SEED = {"tune": 0, "report": 1000}
RIVALS = (TORCHSERVE, TAKE_ALL, TAKE_LIVING, CORK, REFUSE_BY_MEAN)
_LOADS = (0.5, 0.8, 0.95, 1.2)
_TAILS = ({"noise": 0.5}, {"noise": 0.7}, {"noise": 1.0}, {"pareto": 1.5})
_GAMMA4 = "gamma CV 4"


@dataclass(frozen=True)
class Group:
    """Cases that have something in common.

    Attributes:
        title: What that is.
        cases: Makes them.
        late_goal: Whether a goal that is set late is tried, too.
    """

    title: str
    cases: Callable[[], Sequence[Case]]
    late_goal: bool = False

    def names(self, workers: int, words: Sequence[str] | None = None) -> tuple[str, ...]:
        """Everybody who runs a case with so many workers; BentoML has one batch in flight.

        Args:
            workers: How many.
            words: Leave out those whose names contain none of these.
        """
        rivals = [one for one in RIVALS if workers == 1 or one is not CORK]
        ours = (ADAPTIVE, COLD, LATE_GOAL) if self.late_goal else (ADAPTIVE, COLD)
        names = [one.name for one in (*rivals, *ours)]
        return (*(n for n in names if words is None or any(word in n for word in words)), OPTIMUM)


def _heavy_tails() -> list[Case]:
    """The factor of each batch is drawn from a distribution with a long tail."""
    cases = [
        Case(model.name, POISSON, load, **tail, requests=3000)
        for model in (SLOW, CPU, GPU)
        for tail in _TAILS
        for load in (0.5, 0.8)
    ]
    beyond = [
        Case(model.name, POISSON, 1.2, noise=1.0, requests=3000) for model in (SLOW, CPU, GPU)
    ]
    return cases + beyond


def _curves(models: Sequence[Profile]) -> list[Case]:
    """Long enough that a cold start is over."""
    return [
        Case(model.name, POISSON, load, requests=2 * SETTLED) for model in models for load in _LOADS
    ]


def _first_requests() -> list[Case]:
    return [Case(model.name, POISSON, load, requests=300) for model in PROFILES for load in _LOADS]


def _several_workers() -> list[Case]:
    return [
        Case(model.name, arrivals, load, workers=workers, requests=1000 * workers)
        for workers in (2, 4)
        for model in PROFILES
        for arrivals in (POISSON, MMPP3)
        for load in (0.5, 0.8, 0.95, 1.1)
    ]


def _pauses() -> list[Case]:
    return [
        Case(model.name, arrivals, load, requests=4000, pause=pause)
        for pause in (5, 10, 20)
        for model in (GPU, TIGHT)
        for arrivals in (POISSON, MMPP3)
        for load in (0.5, 0.8)
    ]


def _bursts() -> list[Case]:
    return [
        Case(model.name, arrivals, load, workers=workers, requests=2000)
        for model, arrivals, load, workers in product(
            (GPU, TIGHT), (MMPP10, _GAMMA4), (0.5, 0.8), (1, 4)
        )
    ]


def _late_goals() -> list[Case]:
    models = (GPU, TIGHT, CLIFFS[0], CONVEX[1])
    return [
        Case(model.name, POISSON, load, requests=3000, uncounted=1000)
        for model in models
        for load in (0.5, 0.8, 0.95)
    ]


def _arrivals(*names: str) -> Callable[[], list[Case]]:
    def make() -> list[Case]:
        return [
            Case(model.name, arrivals, load, workers=workers, requests=3000 * workers)
            for model, arrivals, workers in product((GPU, TIGHT, CPU), names, (1, 4))
            for load in (0.5, 0.8, 1.1)
        ]

    return make


def _bimodal() -> list[Case]:
    return [
        Case(model.name, POISSON, load, workers=workers, bimodal=factor, requests=3000)
        for model, factor, workers in product((SLOW, GPU, TIGHT), (2, 5), (1, 4))
        for load in (0.5, 0.8, 1.1)
    ]


def _noisy() -> list[Case]:
    """Costs whose 90th percentile is above 1.35 times the mean, and worse."""
    return [
        Case(model.name, arrivals, load, noise=noise, requests=3000)
        for model, arrivals, noise in product((SLOW, GPU, FLAT), (POISSON, MMPP3), (0.4, 1.0))
        for load in (0.5, 0.8, 1.2)
    ]


def _noisy_workers() -> list[Case]:
    return [
        Case(model.name, POISSON, load, workers=workers, noise=noise, requests=1500 * workers)
        for model in (*PROFILES, SLOW)
        for load, workers, noise in product((0.8, 0.95), (2, 4), (0.4, 0.7))
    ]


def _drifts(slowdowns: int) -> Callable[[], list[Case]]:
    """The load is that of the machine while it is fast."""

    def make() -> list[Case]:
        return [
            Case(model.name, arrivals, load, slower=slower, slowdowns=slowdowns, requests=6000)
            for model, slower in product((GPU, TIGHT, FLAT, CLIFFS[0]), (1.5, 3))
            for arrivals in (POISSON, TRACE)
            for load in (0.25, 0.5, 0.8)
        ]

    return make


def _early_drifts() -> list[Case]:
    """When the machine becomes slower, a cold start has seen small batches only."""
    return [
        Case(model.name, arrivals, load, slower=slower, slow_from=0.02, requests=3000)
        for model, slower in product((GPU, TIGHT, FLAT, CLIFFS[0]), (2, 3))
        for arrivals in (POISSON, TRACE)
        for load in (0.2, 0.3, 0.4)
    ]


def _outages() -> list[Case]:
    return [
        Case(model.name, arrivals, load, workers=workers, outage=outage, requests=2500 * workers)
        for model, arrivals, workers in product((GPU, TIGHT, CPU), (POISSON, MMPP3), (2, 4))
        for outage, load in product((1, 5), (0.5, 0.8))
    ]


def _slight_noise() -> list[Case]:
    return [replace(case, noise=0.15) for case in single_worker(1500, 1)]


GROUPS = {
    "smooth": Group("the grid of one worker", lambda: single_worker(1500, 1)),
    "slight": Group("the same with slight noise", _slight_noise),
    "heavy": Group("heavy-tailed service", _heavy_tails),
    "cliff": Group("cliff at size 16", lambda: _curves(CLIFFS)),
    "convex": Group("convex costs", lambda: _curves(CONVEX)),
    "first": Group("first 300 requests", _first_requests),
    "workers": Group("2 and 4 workers", _several_workers),
    "pauses": Group("pauses of 5 to 20 goals", _pauses),
    "bursts": Group("bursts", _bursts),
    "flash": Group("flash crowds", _arrivals(FLASH)),
    "on-off": Group("on/off sources with heavy tails", _arrivals(ON_OFF)),
    "traces": Group("generated traces", _arrivals(TRACE, GENERATED)),
    "bimodal": Group("bimodal costs", _bimodal),
    "noisy": Group("strongly noisy costs", _noisy),
    "noisy-workers": Group("noisy costs, 2 and 4 workers", _noisy_workers),
    "drift": Group("slower from the middle on", _drifts(1)),
    "early": Group("slower almost from the start on", _early_drifts),
    "throttling": Group("throttled four times", _drifts(4)),
    "outages": Group("a worker dies", _outages),
    "late": Group("a goal set after 1000 requests", _late_goals, late_goal=True),
}
# How many seeds each case has; some groups are cheap, and tails need many to be told apart.
_SEEDS = {"heavy": 3, "first": 8, "bimodal": 2, "noisy": 2, "noisy-workers": 2}
_FACTOR = {"tune": 1, "report": 2}


def cases(
    group: str, seeds: str, repetitions: int | None = None, requests: int | None = None
) -> list[Case]:
    """The cases of a group, with seeds for tuning or for reporting."""
    count = repetitions or _SEEDS.get(group, 1) * _FACTOR[seeds]
    some = [
        replace(case, seeds=count, first_seed=FIRST_SEED[seeds]) for case in GROUPS[group].cases()
    ]
    return [replace(case, requests=requests) for case in some] if requests else some
