"""Pictures of where policies win and lose: noisy costs, cliffs, cold starts, bursts, pauses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grid
import numpy as np
from contenders import ADAPTIVE, COLD, CORK, TAKE_ALL, TAKE_LIVING, TORCHSERVE
from engine import Contender
from grid import OPTIMUM, SETTLED, Case
from groups import FIRST_SEED
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import plot, save, styled
from profiles import CLIFFS, CONVEX, GPU, SLOW, TIGHT
from workloads import MMPP10, POISSON

_LOADS = tuple(tenths / 10 for tenths in range(1, 14))
_EVERYBODY = (ADAPTIVE, COLD, CORK, TAKE_LIVING, TORCHSERVE, TAKE_ALL)
_SEED = FIRST_SEED["report"]


@dataclass(frozen=True)
class _Panel:
    """One of the small pictures: a case at many loads."""

    title: str
    case: Case

    @property
    def cases(self) -> list[Case]:
        """The case at each load."""
        return [replace(self.case, load=load, first_seed=_SEED) for load in _LOADS]


_PANELS = (
    _Panel(
        "tails: costs lognormal, sigma 1",
        Case(SLOW.name, POISSON, 1.0, noise=1.0, seeds=6, requests=3000),
    ),
    _Panel(
        "tight goal, 4 workers", Case(TIGHT.name, POISSON, 1.0, workers=4, seeds=1, requests=12000)
    ),
    _Panel("bursts of 10 times the mean", Case(GPU.name, MMPP10, 1.0, seeds=1, requests=4000)),
    _Panel(
        "a cliff: beyond 16 costs double",
        Case(CLIFFS[0].name, POISSON, 1.0, seeds=1, requests=4000),
    ),
    _Panel(
        "convex: costs rise with n squared",
        Case(CONVEX[1].name, POISSON, 1.0, seeds=1, requests=4000),
    ),
    _Panel("4 pauses of 5 goals", Case(GPU.name, POISSON, 1.0, pause=5, seeds=1, requests=10000)),
)


def draw(directory: Path, processes: int | None = None) -> None:
    """Write both pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    with styled():
        save(_goodput_over_load(processes), directory / "hard_cases.png")
        save(_cold_starts(), directory / "cold_starts.png")


def _goodput_over_load(processes: int | None) -> Figure:
    figure, table = plt.subplots(2, 3, figsize=(11, 6.5), sharex=True, sharey=True)
    for axes, panel in zip(table.flat, _PANELS, strict=True):
        cases = panel.cases
        names = [one.name for one in _EVERYBODY if cases[0].workers == 1 or one is not CORK]
        jobs = [(case, (*names, OPTIMUM)) for case in cases]
        results = grid.run_all(jobs, processes)
        # Where costs are random there is no bound, and the best of all would only cover its line.
        drawn = names if cases[0].noise else [OPTIMUM, *names]
        for name in drawn:
            plot(axes, name, _LOADS, [100 * one.figures[name].goodput for one in results])
        axes.set_title(panel.title, fontsize=10)
        axes.set_ylim(0, 102)
    figure.supxlabel("load, as a share of the capacity", fontsize=10)
    figure.supylabel("answered in time, % of all requests", fontsize=10)
    figure.legend(*table.flat[3].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.subplots_adjust(top=0.86, left=0.07, bottom=0.09, wspace=0.08)
    return figure


def _cold_starts() -> Figure:
    figure, both = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    convex = Case(CONVEX[1].name, POISSON, 0.95, requests=2 * SETTLED, seeds=4, first_seed=_SEED)
    cliff = Case(CLIFFS[0].name, POISSON, 0.95, requests=2 * SETTLED, seeds=4, first_seed=_SEED)
    contenders = (ADAPTIVE, COLD, TAKE_ALL)
    _over_time(both[0], convex, contenders, 200)
    both[0].set_title("convex costs (n squared), load 0.95", fontsize=10)
    _over_time(both[1], cliff, contenders, 200)
    both[1].set_title("a cliff beyond batches of 16, load 0.95", fontsize=10)
    for axes in both:
        axes.set_xlabel("requests since the start")
        axes.set_ylim(0, 102)
    both[0].set_ylabel("answered in time, %")
    both[1].legend(loc="lower right")
    return figure


def _over_time(axes: Axes, case: Case, contenders: Sequence[Contender], block: int) -> None:
    """Goodput of block after block of requests, means over the seeds."""
    for contender in contenders:
        good = np.mean([case.outcome(contender, seed).good for seed in case.all_seeds], axis=0)
        shares = 100 * good.reshape(-1, block).mean(axis=1)
        plot(axes, contender.name, np.arange(len(shares)) * block + block / 2, shares)
