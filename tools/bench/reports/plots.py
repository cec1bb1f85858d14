"""The pictures of the HTML page, drawn by matplotlib as inline SVG.

matplotlib supports fixed colours only. Each colour here is a placeholder that is replaced by a CSS
variable in the finished SVG, so that pictures follow the page into dark mode. Series differ in
dashes as well as in colour, for readers with colour blindness.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from marserve.tools.bench.reports.curves import Curve
from marserve.tools.bench.reports.summary import Summary, number

_INK, _FAINT, _GRID = "#0000f0", "#0000f1", "#0000f2"
_SERIES = tuple(f"#0000{index:02x}" for index in range(1, 7))
_VARIABLES = {_INK: "--ink", _FAINT: "--faint", _GRID: "--grid"} | {
    colour: f"--series-{index}" for index, colour in enumerate(_SERIES, start=1)
}
_DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (7, 2, 2, 2)), (0, (9, 3)), (0, (1, 1)))
#: The largest number of distinguishable lines.
MAX_SERIES = len(_SERIES)

_SIZE = (12.0, 4.2)  # inches; the page scales it
# Edges of the axes as shares of the size: equal in all pictures, with a margin for the legend.
_FRAME = {"left": 0.065, "right": 0.79, "bottom": 0.13, "top": 0.96}
_LEGEND_AT = (1.01, 1.0)
# Text remains text: it can be read aloud, searched and copied, in the reader's fonts.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "marserve",  # the same picture has the same bytes
    "text.parse_math": False,
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _FAINT,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _FAINT,
    "ytick.labelcolor": _FAINT,
    "legend.frameon": False,
}
# Number of drawn percentiles for each nine (90 %, 99 %, ...).
_STEPS_PER_NINE = 40
_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)
# Ratio of the largest to the smallest value above which the scale is logarithmic.
_LOG_FROM = 20.0


@dataclass(frozen=True)
class Series:
    """The runs of a point, and their label in the legend."""

    label: str
    summary: Summary


def percentiles(series: Sequence[Series], alternative: str, name: str) -> str:
    """Draw latency by percentile, with the axis stretched towards the slowest answers.

    Args:
        series: At most `MAX_SERIES` successful ones.
        alternative: Description of the picture for screen readers.
        name: Name of the picture, unique in the page.
    """

    def draw(axes: Axes) -> None:
        for index, item in enumerate(series):
            _draw_percentiles(axes, item, index)
        _scale(axes, [run.latencies_ms for value in series for run in value.summary.runs])
        right = max(_nines(value.summary) for value in series)
        ticks = [tick for tick in _TICKS if _place(tick) <= right]
        axes.set_xticks([_place(tick) for tick in ticks], [f"{tick:g} %" for tick in ticks])
        axes.set_xlim(0, right)
        axes.set_xlabel("share of the answers")
        axes.set_ylabel("latency, ms")

    return _svg(draw, alternative, name)


def timeline(series: Sequence[Series], alternative: str, name: str) -> str:
    """Draw the answers in each second, with a line for every run.

    Args:
        series: At most `MAX_SERIES` successful ones.
        alternative: Description of the picture for screen readers.
        name: Name of the picture, unique in the page.
    """

    def draw(axes: Axes) -> None:
        for index, item in enumerate(series):
            for count, run in enumerate(item.summary.runs):
                label = (count == 0 and item.label) or None
                seconds = range(1, len(run.timeline) + 1)
                axes.plot(seconds, run.timeline, label=label, **_line(index))
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("second")
        axes.set_ylabel("answers per second")

    return _svg(draw, alternative, name)


def throughput_and_latency(curves: Sequence[Curve], alternative: str, name: str) -> str:
    """Draw latency over throughput: p99 as marked lines, p50 dotted.

    Args:
        curves: At most `MAX_SERIES`.
        alternative: Description of the picture for screen readers.
        name: Name of the picture, unique in the page.
    """

    def draw(axes: Axes) -> None:
        for index, curve in enumerate(curves):
            colour = _SERIES[index]
            across = [item.throughput for item in curve.places]
            p99s = [item.p99_ms for item in curve.places]
            p50s = [item.p50_ms for item in curve.places]
            axes.plot(
                across, p99s, marker="o", markersize=4, label=curve.label or None, **_line(index)
            )
            axes.plot(across, p50s, color=colour, linestyle=":", linewidth=1, marker=".")
            for place in curve.places:
                _annotate(axes, place.label, (place.throughput, place.p99_ms))
        _scale(axes, [[item.p50_ms, item.p99_ms] for curve in curves for item in curve.places])
        axes.set_xlim(left=0)
        axes.set_xlabel("answers per second")
        axes.set_ylabel("latency, ms")

    return _svg(draw, alternative, name)


# -- drawing ---------------------------------------------------------------------------------------


def _draw_percentiles(axes: Axes, series: Series, index: int) -> None:
    last = _nines(series.summary)
    steps = range(math.ceil(last * _STEPS_PER_NINE))
    places = [*(step / _STEPS_PER_NINE for step in steps), last]
    runs = series.summary.runs
    values = [[run.percentile_ms(100 - 100 * 10**-place) for run in runs] for place in places]
    axes.plot(places, [median(ones) for ones in values], label=series.label or None, **_line(index))
    if len(runs) > 1:
        low, high = [min(ones) for ones in values], [max(ones) for ones in values]
        axes.fill_between(places, low, high, color=_SERIES[index], alpha=0.15, linewidth=0)


def _nines(summary: Summary) -> float:
    """Return the number of nines of the last meaningful percentile: 3 (99.9 %) for 1000 answers."""
    return max(1.0, math.log10(min(run.answers for run in summary.runs)))


def _place(percent: float) -> float:
    return -math.log10(1 - percent / 100)


def _line(index: int) -> dict[str, Any]:
    return {"color": _SERIES[index], "linestyle": _DASHES[index], "linewidth": 1.6}


def _scale(axes: Axes, values: Sequence[Sequence[float]]) -> None:
    low = min(map(min, values))
    high = max(map(max, values))
    if low > 0 and high / low > _LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: number(value))
        axes.yaxis.set_minor_formatter(lambda _value, _: "")
    else:
        axes.set_ylim(bottom=0)


def _annotate(axes: Axes, text: str, place: tuple[float, float]) -> None:
    axes.annotate(text, place, xytext=(4, 5), textcoords="offset points", fontsize=8, color=_FAINT)


# -- SVG -------------------------------------------------------------------------------------------


def _svg(draw: Callable[[Axes], None], alternative: str, name: str) -> str:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE)
        figure.subplots_adjust(**_FRAME)
        axes = figure.add_subplot()
        draw(axes)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="upper left", bbox_to_anchor=_LEGEND_AT, borderaxespad=0)
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return _for_page(text.getvalue(), alternative, name)


def _for_page(svg: str, alternative: str, name: str) -> str:
    """Convert an SVG file to an element of a page, with unique ids and without style rules."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[^"]*pt"', "", svg, count=2)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alternative)}"', 1).strip()
