"""Which pictures the HTML page has, and what is said about them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from marserve.tools.bench.recommendation import Recommendation
from marserve.tools.bench.reports.curves import Curve, curves
from marserve.tools.bench.reports.summary import FAILED, Summary, format_point, varied

T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """A picture with its words.

    Attributes:
        title: Above it.
        svg: Itself, as part of a page.
        caption: How to read it.
    """

    title: str
    svg: str
    caption: str


_PERCENTILES = (
    "Read it from the right: the latency that all but so few answers kept within, the axis "
    "stretched towards the slowest. Where runs were repeated, the line is the median of the runs "
    "and the band reaches from the smallest to the largest."
)
_TIMELINE = (
    "Answers in each second of a run: a level line is a server that had settled, dips are pauses. "
    "Every run is a line of its own."
)
_CURVE = (
    "Marked lines are p99, dotted lines p50; the numbers at the marks are: {along}. Where a line "
    "turns up without going further to the right, more load only makes answers slower."
)


def pictures(
    summaries: Sequence[Summary], recommendation: Recommendation | None = None
) -> Iterator[Picture]:
    """Draw what there is to see; points that failed are left out, and that is said.

    Of a search only the settings found are drawn one by one, the others as curves.

    Raises:
        ImportError: matplotlib cannot be imported.
    """
    # Here, for it is an extra, and takes half a second.
    from marserve.tools.bench.reports.plots import (
        Series,
        percentiles,
        throughput_and_latency,
        timeline,
    )

    good = [summary for summary in summaries if not summary.has_failed]
    left_out = len(summaries) - len(good)
    note = f" Points that {FAILED} are left out: {left_out}." if left_out else ""
    lines = _curves(good, recommendation)
    if any(len(line.places) > 1 for line in lines):
        caption = _CURVE.format(along=lines[0].along) + note
        yield from _drawn("Throughput and latency", lines, throughput_and_latency, caption)
    featured = _featured(good, recommendation)
    settings = varied([item.point for item in featured])
    series = [Series(format_point(item.point, settings), item) for item in featured]
    yield from _drawn("Latency by percentile", series, percentiles, _PERCENTILES + note)
    timed = [item for item in series if all(run.timeline for run in item.summary.runs)]
    yield from _drawn("Throughput over time", timed, timeline, _TIMELINE + note)


def _drawn(
    title: str, items: Sequence[T], draw: Callable[[Sequence[T], str, str], str], caption: str
) -> Iterator[Picture]:
    """As many pictures as it takes to tell the lines apart."""
    from marserve.tools.bench.reports.plots import MAX_SERIES

    key = title.lower().replace(" ", "-")
    parts = [items[at : at + MAX_SERIES] for at in range(0, len(items), MAX_SERIES)]
    for count, part in enumerate(parts, start=1):
        heading = title if len(parts) == 1 else f"{title} ({count} of {len(parts)})"
        alternative = f"{heading}; the numbers are in the table of results"
        yield Picture(heading, draw(part, alternative, f"{key}-{count}"), caption)


def _curves(good: Sequence[Summary], recommendation: Recommendation | None) -> list[Curve]:
    """Of a search only the full loads: its open loops differ in how batches wait."""
    if recommendation is None:
        return curves(good)
    return curves([item for item in good if item.point.rate is None])


def _featured(good: Sequence[Summary], recommendation: Recommendation | None) -> Sequence[Summary]:
    if recommendation is None:
        return good
    choice = recommendation.choice
    wanted = (choice.saturated, choice.confirmed) if choice else (recommendation.nearest,)
    points = [item.point for item in wanted if item is not None]
    return [item for item in good if item.point in points]
