"""Summaries of runs: one line for the repetitions of a point, with their spread.

Percentiles are computed for each run; a summary has their median, smallest and largest value.
Percentiles of the pooled latencies would give the longest run the largest weight, and hide
differences between runs.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marserve.tools.bench.measurement import Measurement, Point, Session

#: Text for unknown figures and unchanged settings.
NOTHING = "-"
FAILED = "FAILED"


@dataclass(frozen=True)
class Spread:
    """A figure of several runs.

    Attributes:
        median: Median over the runs.
        low: Smallest value.
        high: Largest value.
        runs: Number of runs.
    """

    median: float
    low: float
    high: float
    runs: int = 1

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        median = number(self.median)
        if self.runs == 1:
            return median
        return f"{median} ({number(self.low)}-{number(self.high)})"


@dataclass(frozen=True)
class Setting:
    """A setting of a point.

    Attributes:
        name: Name of the attribute of `Point`.
        heading: Heading of its column.
        words: Its text in a sentence, with ``{}`` for the value.
        words_for_one: The text for the value 1; empty if it is the same.
    """

    name: str
    heading: str
    words: str
    words_for_one: str = ""

    def of(self, point: Point) -> int | float | str | None:
        """Return the value; None leaves the setting unchanged."""
        value: int | float | str | None = getattr(point, self.name)
        return value

    def format(self, point: Point) -> str:
        """Return the text of the value; empty for None."""
        value = self.of(point)
        words = (self.words_for_one if value == 1 else "") or self.words
        return "" if value is None else words.format(plain(value))


SETTINGS = (
    Setting("clients", "clients", "{} clients", "{} client"),
    Setting("rate", "requests/s", "{} requests/s"),
    Setting("workers", "workers", "{} workers", "{} worker"),
    Setting("performance_hint", "hint", "hint {}"),
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
    """A measured figure.

    Attributes:
        name: Name in CSV and JSON, with the unit.
        heading: Heading of its column in tables.
        of: Returns the value of a successful run; None if it is unknown.
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
#: The figures of a run with a latency goal; shares are of all its requests.
GOAL_FIGURES = (
    Figure("in_time_percent", "in time %", lambda run: _in_time(run, 100 / run.requests)),
    Figure("in_time_per_s", "in time/s", lambda run: _in_time(run, 1 / run.seconds)),
    Figure("refused", "refused", lambda run: None if run.goal_ms is None else run.refused),
    Figure("late", "late", lambda run: run.goal_ms and run.answers - run.within(run.goal_ms)),
)


def _in_time(run: Measurement, factor: float) -> float | None:
    return None if run.goal_ms is None else run.within(run.goal_ms) * factor


FIRST_INFERENCE = Figure("first_inference_ms", "first ms", lambda run: run.first_inference_ms)


@dataclass(frozen=True)
class Summary:
    """All runs of a point.

    Attributes:
        point: The load and the settings.
        runs: The runs in order.
        failures: For each run, why it has failed; empty if it has not.
    """

    point: Point
    runs: Sequence[Measurement]
    failures: Sequence[str]

    @property
    def has_failed(self) -> bool:
        """Whether any run failed; figures of the other runs are then not reported either."""
        return any(self.failures)

    @property
    def errors(self) -> Counter[str]:
        """Return the errors of all runs by kind."""
        return sum((Counter(run.errors) for run in self.runs), Counter())

    def spread(self, figure: Figure) -> Spread | None:
        """Return a figure over the runs; None if a run failed, or no run has the figure."""
        if self.has_failed:
            return None
        values = [value for run in self.runs if (value := figure.of(run)) is not None]
        return Spread.of(values) if values else None


def summarise(session: Session) -> list[Summary]:
    """Summarise the points of a session, in the order of their first measurement."""
    runs: dict[Point, list[Measurement]] = {}
    for measurement in session.measurements:
        runs.setdefault(measurement.point, []).append(measurement)
    allowed = session.allowed_error_share
    return [
        Summary(point, ones, [item.failure(allowed) for item in ones])
        for point, ones in runs.items()
    ]


def varied(points: Sequence[Point]) -> list[Setting]:
    """Return the settings in which points differ."""
    return [setting for setting in SETTINGS if len({setting.of(point) for point in points}) > 1]


def format_point(point: Point, settings: Sequence[Setting] = SETTINGS) -> str:
    """Return the settings of a point as text: "8 clients, batch size 4"."""
    return ", ".join(filter(None, (setting.format(point) for setting in settings)))


def number(value: float) -> str:
    """Format with three significant digits: 0.0123, 1.23, 12.3, 123, 1234."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plain(value: float | str | None) -> str:
    """Format a value; texts with control characters for a terminal are escaped."""
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value if value.isprintable() else ascii(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
