"""The same as pictures; needs matplotlib."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from contenders import (
    ADAPTIVE,
    COLD,
    CORK,
    LONG_WINDOW,
    SHORT_WINDOW,
    TAKE_ALL,
    TAKE_LIVING,
    TORCHSERVE,
)
from grid import OPTIMUM, Result
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from profiles import GPU
from scenarios import STEP_SECONDS, Story
from workloads import MMPP3, POISSON

_DOTS_PER_INCH = 150
_MS = 1000
LOAD = "load, as a share of what full batches can serve"
# Nobody must need colours to tell the lines apart.
_LOOKS = {
    OPTIMUM: {"color": "black", "ls": ":", "lw": 1.5, "zorder": 4},
    ADAPTIVE.name: {"color": "#12715b", "ls": "-", "lw": 2.5, "zorder": 3},
    COLD.name: {"color": "#12715b", "ls": ":", "lw": 2.0, "zorder": 3},
    CORK.name: {"color": "#6a4c93", "ls": "--", "marker": "D"},
    TAKE_LIVING.name: {"color": "#3b7dbd", "ls": "--", "marker": "v"},
    TORCHSERVE.name: {"color": "#b2452f", "ls": "--", "marker": "o"},
    TAKE_ALL.name: {"color": "#7a7a7a", "ls": "--", "marker": "^"},
    SHORT_WINDOW.name: {"color": "#c98a1b", "ls": "--", "marker": "s"},
    LONG_WINDOW.name: {"color": "#b2452f", "ls": "--", "marker": "o"},
}
_LABELS = {OPTIMUM: "optimum (knows the future)"}


@dataclass(frozen=True)
class Drawn:
    """What is drawn.

    Attributes:
        curves: The GPU at many loads, with Poisson arrivals and with bursts.
        grid: The grid of one worker.
        step: The load step.
    """

    curves: Sequence[Result]
    grid: Sequence[Result]
    step: Sequence[Story]


@contextmanager
def styled() -> Iterator[None]:
    """All pictures look alike."""
    style = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "lines.linewidth": 1,
        "lines.markersize": 4,
        "legend.fontsize": 8,
        "legend.framealpha": 1.0,
        "legend.edgecolor": "white",
        "savefig.bbox": "tight",
        "savefig.dpi": _DOTS_PER_INCH,
    }
    mpl.use("Agg")
    with mpl.rc_context(style):
        yield


def draw_all(directory: Path, drawn: Drawn) -> None:
    """Write all pictures as PNG into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with styled():
        save(_goodput_over_load(drawn.curves), directory / "goodput.png")
        save(_latency_over_load(drawn.curves), directory / "latency.png")
        save(_regret(drawn.grid), directory / "regret.png")
        save(_step(drawn.step), directory / "load_step.png")


def _goodput_over_load(curves: Sequence[Result]) -> Figure:
    figure, both = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    names = (OPTIMUM, ADAPTIVE.name, CORK.name, TAKE_LIVING.name, TORCHSERVE.name, TAKE_ALL.name)
    titles = ("Poisson arrivals", "bursts of 3 times the mean")
    for axes, arrivals, title in zip(both, (POISSON, MMPP3), titles, strict=True):
        some = [one for one in curves if one.case.arrivals == arrivals]
        for name in names:
            plot(axes, name, _loads(some), [100 * one.figures[name].goodput for one in some])
        axes.set_title(title, fontsize=10)
    figure.supxlabel(LOAD, fontsize=10, y=-0.02)
    both[0].set_ylabel(f"answered within {GPU.goal * _MS:.0f} ms, % of all requests")
    both[0].set_ylim(0, 102)
    both[0].legend(loc="lower left")
    return figure


def _latency_over_load(curves: Sequence[Result]) -> Figure:
    figure, both = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    some = [one for one in curves if one.case.arrivals == POISSON]
    for name in (LONG_WINDOW.name, SHORT_WINDOW.name, ADAPTIVE.name):
        figures = [one.figures[name] for one in some]
        plot(both[0], name, _loads(some), [_MS * one.latency for one in figures])
        plot(both[1], name, _loads(some), [_MS * one.p99 for one in figures])
    for axes, title in zip(both, ("mean", "99th percentile"), strict=True):
        axes.axhline(GPU.goal * _MS, color="black", lw=0.8, ls=":")
        axes.set_yscale("log")
        axes.set_ylim(4, 400)
        axes.set_yticks([5, 10, 20, 50, 100, 200])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.set_title(title, fontsize=10)
    figure.supxlabel(LOAD, fontsize=10, y=-0.02)
    both[0].set_ylabel("latency of all answers, ms")
    both[1].text(1.31, GPU.goal * _MS * 1.06, "goal", fontsize=8, ha="right")
    both[0].legend(loc="upper left")
    return figure


def _regret(results: Sequence[Result]) -> Figure:
    """Points of goodput below the optimum, case by case, of the best three."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in (ADAPTIVE.name, CORK.name, TAKE_LIVING.name):
        regrets = sorted(100 * one.regret(name) for one in results)
        plot(axes, name, range(1, len(regrets) + 1), regrets)
    axes.axhline(3, color="black", lw=0.8, ls=":")
    axes.set_xlabel("cases, each policy's best first")
    axes.set_ylabel("points of goodput below the optimum")
    axes.set_ylim(0, 12)
    axes.legend()
    return figure


def _step(stories: Iterable[Story]) -> Figure:
    """Goodput while the load rises beyond the capacity and falls again."""
    figure, axes = plt.subplots(figsize=(7, 4))
    edges = np.arange(0.0, sum(STEP_SECONDS) + 1e-9, 0.1)
    for one in stories:
        if one.name in (ADAPTIVE.name, CORK.name, TAKE_LIVING.name, TAKE_ALL.name):
            arrived, good = one.outcome.arrived, one.outcome.good
            total, _ = np.histogram(arrived, edges)
            served, _ = np.histogram(arrived[good], edges)
            plot(axes, one.name, edges[:-1] + 0.05, 100 * served / np.maximum(total, 1))
    axes.axvspan(STEP_SECONDS[0], sum(STEP_SECONDS[:2]), color="#f3f0e8", zorder=0)
    axes.set_xlabel("seconds; shaded: 1.5 times the capacity")
    axes.set_ylabel("answered in time, % of the requests of the moment")
    axes.legend(loc="lower right")
    return figure


def plot(axes: Axes, name: str, x: Iterable[float], y: Iterable[float]) -> None:
    """Draw the line of a contender in its looks."""
    axes.plot(list(x), list(y), label=_LABELS.get(name, name), **_LOOKS[name])


def _loads(results: Iterable[Result]) -> list[float]:
    return [one.case.load for one in results]


def save(figure: Figure, file: Path) -> None:
    """Write a picture, and forget it."""
    figure.savefig(file)
    plt.close(figure)
