"""Groups the points of a sweep into the lines of a plot."""

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
# Settings that may vary along a line, in the order of preference. The pair is for sweeps in which
# clients grow with the batch size.
_VARIED_TOGETHER = tuple(
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
    """A point of a curve, with medians over repeated runs.

    Attributes:
        label: The value of the setting that varies along the curve.
        throughput: Answers per second.
        p50_ms: Median latency, milliseconds.
        p99_ms: 99th percentile of the latencies, milliseconds.
    """

    label: str
    throughput: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Curve:
    """Points that differ in one setting only.

    Attributes:
        label: The settings in which the curve differs from others; empty for a single curve.
        along: Heading of the setting that varies along the curve.
        places: The points in the order of their measurement.
    """

    label: str
    along: str
    places: Sequence[Place]


def curves(summaries: Sequence[Summary]) -> list[Curve]:
    """Return the successful points on the smallest number of lines."""
    good = [summary for summary in summaries if not summary.has_failed]
    settings = varied([item.point for item in good])
    groupings = [_grouped(good, settings, along) for along in _VARIED_TOGETHER]
    possible = [
        (along, groups) for along, groups in zip(_VARIED_TOGETHER, groupings, strict=True) if groups
    ]
    along, groups = min(possible, key=lambda item: len(item[1]), default=(_VARIED_TOGETHER[0], []))
    others = [setting for setting in settings if setting not in along]
    return [
        Curve(
            format_point(group[0].point, others),
            along[0].heading,
            [_place(value, along[0]) for value in group],
        )
        for group in groups
    ]


def _grouped(
    summaries: Sequence[Summary], settings: Sequence[Setting], along: Sequence[Setting]
) -> list[list[Summary]]:
    """Group points that differ only in ``along``; empty if a group has a value of it twice."""
    groups: dict[Hashable, list[Summary]] = {}
    for summary in summaries:
        key = tuple(setting.of(summary.point) for setting in settings if setting not in along)
        groups.setdefault(key, []).append(summary)
    points = [[item.point for item in group] for group in groups.values()]
    are_distinct = all(_has_distinct(group, setting) for group in points for setting in along)
    return list(groups.values()) if are_distinct else []


def _has_distinct(points: Sequence[Point], setting: Setting) -> bool:
    values = [setting.of(point) for point in points]
    return len(values) == len(set(values))


def _place(summary: Summary, along: Setting) -> Place:
    spreads = [summary.spread(figure) for figure in (_THROUGHPUT, _P50, _P99)]
    throughput, p50, p99 = (spread.median for spread in spreads if spread is not None)
    return Place(plain(along.of(summary.point)), throughput, p50, p99)
