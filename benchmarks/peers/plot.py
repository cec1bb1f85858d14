"""The ratios as a picture; needs matplotlib."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from cases import Case
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from results import NOT_PEERS, Standing, Turns, standings

_COLUMNS = 2
_AHEAD, _BEHIND, _GREY = "#12715b", "#b2452f", "#9a9a9a"
_STYLE = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 8}


def draw(cases: Sequence[Case], turns: Turns, path: Path) -> None:
    """One bar for each peer in each case, from 1 to the median ratio, with its spread."""
    shown = [(case, found) for case in cases if (found := _held_against_us(case, turns))]
    starts = range(0, len(shown), _COLUMNS)
    mpl.use("Agg")
    with mpl.rc_context(_STYLE):
        heights = [max(len(found) for _, found in shown[at : at + _COLUMNS]) for at in starts]
        figure, grid = plt.subplots(
            len(starts),
            _COLUMNS,
            figsize=(9, 0.22 * sum(heights) + 0.7 * len(starts)),
            sharex=True,
            squeeze=False,
            height_ratios=heights,
        )
        axes = list(grid.flat)
        for one, (case, found) in zip(axes, shown, strict=False):
            _draw_case(one, case, found)
        for one in axes[len(shown) :]:
            one.set_visible(False)
        figure.supxlabel("marserve is ahead by (median and spread of rounds; | the goal)")
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _held_against_us(case: Case, turns: Turns) -> list[Standing]:
    return [one for one in standings(case, turns) if one.ratios][::-1]


def _draw_case(axes: Axes, case: Case, found: Sequence[Standing]) -> None:
    for height, one in enumerate(found):
        median = statistics.median(one.ratios)
        axes.barh(height, median - 1, left=1, height=0.6, color=_colour(one, median))
        axes.hlines(height, min(one.ratios), max(one.ratios), color="black", lw=1)
        if one.goal is not None:
            axes.vlines(one.goal, height - 0.4, height + 0.4, color="black", lw=1.5)
    labels = [f"{one.entry}  {statistics.median(one.ratios):.2g}" for one in found]
    axes.set_yticks(range(len(found)), labels)
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(labelbottom=True)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_title(case.title if case.by_rate else f"{case.title}: p99", loc="left", fontsize=9)


def _colour(one: Standing, median: float) -> str:
    if one.entry in NOT_PEERS:
        return _GREY
    return _AHEAD if median >= 1 else _BEHIND
