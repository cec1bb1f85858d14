"""From runs to figures: repetitions of a point become one line, with their spread.

A percentile belongs to a run. Repetitions are told by the median of their percentiles, with the
smallest and the largest beside it; pooling the latencies of all runs would let the longest run
speak for the others and hide that they differ.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marserve.tools.bench.measurement import Measurement, Point, Session

#: Where nothing is known or was set.
NOTHING = "-"
FAILED = "FAILED"


@dataclass(frozen=True)
class Spread:
    """A figure of several runs.

    Attributes:
        median: Of the runs.
        low: The smallest.
        high: The largest.
        runs: How many there are.
    """

    median: float
    low: float
    high: float
    runs: int = 1

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """That of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        median = number(self.median)
        if self.runs == 1:
            return median
        return f"{median} ({number(self.low)}-{number(self.high)})"


@dataclass(frozen=True)
class Setting:
    """Something that is set for a point.

    Attributes:
        name: The attribute of `Point`.
        heading: Of its column.
        words: In a sentence; ``{}`` is the value.
        words_for_one: The same where the value is 1; empty for no difference.
    """

    name: str
    heading: str
    words: str
    words_for_one: str = ""

    def of(self, point: Point) -> int | float | str | None:
        """Its value; None is "as it was"."""
        value: int | float | str | None = getattr(point, self.name)
        return value

    def format(self, point: Point) -> str:
        """Its value in words; empty for None."""
        value = self.of(point)
        words = (self.words_for_one if value == 1 else "") or self.words
        return "" if value is None else words.format(plain(value))


SETTINGS = (
    Setting("clients", "clients", "{} clients", "{} client"),
    Setting("rate", "requests/s", "{} requests/s"),
    Setting("workers", "workers", "{} workers", "{} worker"),
    Setting("batch_size", "batch size", "batch size {}"),
    Setting("batch_policy", "policy", "policy {}"),
    Setting("max_batch_delay_ms", "delay ms", "delay {} ms"),
    Setting("max_latency_ms", "goal ms", "goal {} ms"),
    Setting("precision", "precision", "precision {}"),
    Setting("torch_threads", "threads", "{} threads of torch", "{} thread of torch"),
    Setting("outstanding_batches", "outstanding", "{} batches outstanding", "{} batch outstanding"),
)


@dataclass(frozen=True)
class Figure:
    """Something that is found by measuring.

    Attributes:
        name: In CSV and JSON, with its unit.
        heading: Of its column in tables.
        of: Its value in a run that did not fail; None where it is not known.
    """

    name: str
    heading: str
    of: Callable[[Measurement], float | None]


def _percentile(percent: float) -> Figure:
    name = f"p{percent:g}"
    return Figure(f"{name}_ms", f"{name} ms", lambda run: run.percentile_ms(percent))


FIGURES = (
    Figure("throughput_per_s", "answers/s", lambda run: run.throughput),
    _percentile(50),
    _percentile(90),
    _percentile(99),
    _percentile(99.9),
    Figure("mean_ms", "mean ms", lambda run: run.mean_ms),
    Figure("mean_batch", "mean batch", lambda run: run.mean_batch),
)
FIRST_INFERENCE = Figure("first_inference_ms", "first ms", lambda run: run.first_inference_ms)


@dataclass(frozen=True)
class Summary:
    """All the runs of a point.

    Attributes:
        point: What was set.
        runs: In their order.
        failures: Of each run, why it says nothing about speed; empty where it does.
    """

    point: Point
    runs: Sequence[Measurement]
    failures: Sequence[str]

    @property
    def has_failed(self) -> bool:
        """Whether any of its runs did: the others are then no measure of this point either."""
        return any(self.failures)

    @property
    def errors(self) -> dict[str, int]:
        """Of all runs, by kind, the most frequent first."""
        total: dict[str, int] = {}
        for run in self.runs:
            for kind, count in run.errors.items():
                total[kind] = total.get(kind, 0) + count
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

    def spread(self, figure: Figure) -> Spread | None:
        """A figure over the runs; None where a run has failed or does not know it."""
        if self.has_failed:
            return None
        values = [value for run in self.runs if (value := figure.of(run)) is not None]
        return Spread.of(values) if values else None


def summarise(session: Session) -> list[Summary]:
    """The points of a session, in the order in which they were first measured."""
    runs: dict[Point, list[Measurement]] = {}
    for measurement in session.measurements:
        runs.setdefault(measurement.point, []).append(measurement)
    allowed = session.allowed_error_share
    return [
        Summary(point, ones, [item.failure(allowed) for item in ones])
        for point, ones in runs.items()
    ]


def varied(points: Sequence[Point]) -> list[Setting]:
    """The settings in which points differ."""
    return [setting for setting in SETTINGS if len({setting.of(point) for point in points}) > 1]


def format_point(point: Point, settings: Sequence[Setting] = SETTINGS) -> str:
    """What was set, in words: "8 clients, batch size 4"."""
    return ", ".join(filter(None, (setting.format(point) for setting in settings)))


def number(value: float) -> str:
    """Three digits that count: 0.0123, 1.23, 12.3, 123, 1234."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plain(value: float | str | None) -> str:
    """What was set, as it was set; what a terminal would obey is shown as an escape."""
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value if value.isprintable() else ascii(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
