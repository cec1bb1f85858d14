"""Whether something grows for ever: what a soak measures, its table, and its verdict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """What was measured after a part of a soak; the last part's rate and latencies.

    Sizes are bytes, latencies seconds.
    """

    seconds: float
    requests: int
    rate: float
    p50: float
    p99: float
    frontend: int
    workers: int
    descriptors: int
    threads: int
    tasks: int
    children: int
    series: int
    logs: int


@dataclass(frozen=True)
class Measure:
    """A column that must not grow: by how much it may, as a share and in its unit.

    Tolerances are for half a run: memory fragments a little, pools fill up, a connection more is
    open at one moment than at another. A soak of a million requests finds a leak of some 60 bytes
    per request.
    """

    name: str
    share: float
    more: float


MEASURES = (
    Measure("frontend", 0.10, 20 * MIB),
    Measure("workers", 0.10, 40 * MIB),
    Measure("descriptors", 0.0, 8),
    Measure("threads", 0.0, 8),
    Measure("tasks", 0.0, 8),
    Measure("children", 0.0, 0),
    Measure("series", 0.0, 4),
    Measure("p99", 1.0, 0.1),
)


def leaks(samples: Sequence[Sample]) -> list[str]:
    """What has grown, in sentences.

    The first quarter is warm-up. The medians of the second and the last are compared: a single
    sample that is large says nothing.
    """
    quarter = len(samples) // 4
    if not quarter:
        return ["too few samples to tell"]
    found = []
    for measure in MEASURES:
        values = [float(getattr(sample, measure.name)) for sample in samples]
        early, late = median(values[quarter : 2 * quarter]), median(values[-quarter:])
        if late > early * (1 + measure.share) + measure.more:
            show = COLUMNS[measure.name]
            found.append(f"{measure.name} grew from {show(early)} to {show(late)}")
    return found


def _mib(value: float) -> str:
    return f"{value / MIB:.1f}"


def _ms(value: float) -> str:
    return f"{value * 1000:.1f}"


def _number(value: float) -> str:
    return f"{value:.0f}"


#: Heading of a column, the unit included, and how its values are written.
COLUMNS: dict[str, Callable[[float], str]] = {
    "seconds": _number,
    "requests": _number,
    "rate": _number,
    "p50": _ms,
    "p99": _ms,
    "frontend": _mib,
    "workers": _mib,
    "descriptors": _number,
    "threads": _number,
    "tasks": _number,
    "children": _number,
    "series": _number,
    "logs": _mib,
}
_UNITS = {"p50": " ms", "p99": " ms", "frontend": " MiB", "workers": " MiB", "logs": " MiB"}


def heading() -> str:
    """The first line of the table."""
    return "  ".join(f"{name}{_UNITS.get(name, '')}" for name in COLUMNS)


def row(sample: Sample) -> str:
    """A line of the table."""
    return "  ".join(
        show(getattr(sample, name)).rjust(len(name + _UNITS.get(name, "")))
        for name, show in COLUMNS.items()
    )
