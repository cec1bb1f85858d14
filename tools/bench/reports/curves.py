"""Which points of a sweep belong on one line, from little load to much."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from marserve.tools.bench.measurement import Point
from marserve.tools.bench.reports.summary import (
    FIGURES,
    SETTINGS,
    Setting,
    Summary,
    format_point,
    plain,
    varied,
)

_THROUGHPUT, _P50, _, _P99 = FIGURES[:4]
_BY_NAME = {setting.name: setting for setting in SETTINGS}
# What a line may lead through, in the order of preference. The pair is for sweeps where the clients
# grow with the batches.
_WALKS = tuple(
    tuple(_BY_NAME[name] for name in names)
    for names in (
        ("clients",),
        ("rate",),
        ("batch_size",),
        ("batch_size", "clients"),
        ("workers",),
        ("max_batch_delay_ms",),
        ("precision",),
        ("torch_threads",),
        ("outstanding_batches",),
    )
)


@dataclass(frozen=True)
class Place:
    """A point of a curve; of repeated runs, the medians.

    Attributes:
        label: The value that grows along the curve.
        throughput: Answers per second.
        p50_ms: Median latency.
        p99_ms: The latency that 99 % kept within.
    """

    label: str
    throughput: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Curve:
    """Points that differ in one thing only.

    Attributes:
        label: In what they differ from other curves; empty where there are none.
        along: What grows along the curve.
        places: In the order in which they were measured.
    """

    label: str
    along: str
    places: Sequence[Place]


def curves(summaries: Sequence[Summary]) -> list[Curve]:
    """The points that did not fail, on as few lines as tell the truth."""
    good = [summary for summary in summaries if not summary.has_failed]
    settings = varied([item.point for item in good])
    walks = [_grouped(good, settings, walk) for walk in _WALKS]
    possible = [(walk, groups) for walk, groups in zip(_WALKS, walks, strict=True) if groups]
    walk, groups = min(possible, key=lambda item: len(item[1]), default=(_WALKS[0], []))
    others = [setting for setting in settings if setting not in walk]
    return [
        Curve(
            format_point(group[0].point, others),
            walk[0].heading,
            [_place(value, walk[0]) for value in group],
        )
        for group in groups
    ]


def _grouped(
    summaries: Sequence[Summary], settings: Sequence[Setting], walk: Sequence[Setting]
) -> list[list[Summary]]:
    """Those that differ only in what is walked; empty where a walk would return to a value."""
    groups: dict[Hashable, list[Summary]] = {}
    for summary in summaries:
        key = tuple(setting.of(summary.point) for setting in settings if setting not in walk)
        groups.setdefault(key, []).append(summary)
    points = [[item.point for item in group] for group in groups.values()]
    leads_on = all(_is_walk(group, setting) for group in points for setting in walk)
    return list(groups.values()) if leads_on else []


def _is_walk(points: Sequence[Point], setting: Setting) -> bool:
    values = [setting.of(point) for point in points]
    return len(values) == len(set(values))


def _place(summary: Summary, along: Setting) -> Place:
    spreads = [summary.spread(figure) for figure in (_THROUGHPUT, _P50, _P99)]
    throughput, p50, p99 = (spread.median for spread in spreads if spread is not None)
    return Place(plain(along.of(summary.point)), throughput, p50, p99)
