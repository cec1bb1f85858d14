"""The selection of the HTML page's pictures, and their captions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from marserve.tools.bench.recommendation import Recommendation
from marserve.tools.bench.reports.curves import Curve, curves
from marserve.tools.bench.reports.summary import FAILED, Summary, format_point, varied

T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """A picture with title and caption.

    Attributes:
        title: Heading above the picture.
        svg: The picture, as an element of the page.
        caption: Text below the picture that explains it.
    """

    title: str
    svg: str
    caption: str


_PERCENTILES = (
    "The latency within which a share of the answers arrived; the axis is stretched towards the "
    "slowest answers. For repeated runs, the line is the median of the runs, and the band reaches "
    "from the smallest to the largest value."
)
_TIMELINE = (
    "Answers in each second of a run: a level line is a server in a steady state, dips are pauses. "
    "Every run has a separate line."
)
_CURVE = (
    "Marked lines are p99, dotted lines p50; the numbers at the marks are: {along}. Where a line "
    "rises without reaching further to the right, more load only increases the latency."
)


def pictures(
    summaries: Sequence[Summary], recommendation: Recommendation | None = None
) -> Iterator[Picture]:
    """Draw the pictures; captions contain the number of failed points, which are left out.

    Of a search, only the recommended settings are drawn separately, the others as curves.

    Raises:
        ImportError: matplotlib cannot be imported.
    """
    # Imported here: matplotlib is optional, and its import takes half a second.
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
    """Draw pictures with at most `MAX_SERIES` lines each."""
    from marserve.tools.bench.reports.plots import MAX_SERIES

    key = title.lower().replace(" ", "-")
    parts = [items[at : at + MAX_SERIES] for at in range(0, len(items), MAX_SERIES)]
    for count, part in enumerate(parts, start=1):
        heading = title if len(parts) == 1 else f"{title} ({count} of {len(parts)})"
        alternative = f"{heading}; the numbers are in the table of results"
        yield Picture(heading, draw(part, alternative, f"{key}-{count}"), caption)


def _curves(good: Sequence[Summary], recommendation: Recommendation | None) -> list[Curve]:
    """Return the curves; of a search only those at full load, as open loops vary the policy."""
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
