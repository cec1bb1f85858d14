"""Metrics in memory: a registry has families, a family one series for each set of label values.

prometheus_client checks the labels and takes a lock at each update, since several threads may
update. Here only the event loop updates, a dozen times per prediction, at a quarter of the cost,
and the same call collects what the metrics log writes. `exposition` renders the page. A series is
shared by all who `join` it. It is on the page from its first update until the last user has left;
later updates are ignored.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from marserve.frontend.telemetry.metrics_config import Declared, unfit_name

#: A request that a histogram counted. The first item is its id; the attributes ``trace_id`` and
#: ``answered`` (monotonic seconds) are on the page where it has them.
Exemplar = tuple[Any, ...]
#: The last label of a bucket is a number.
Labels = tuple[tuple[str, str | float], ...]
#: The suffix of a sample's name, its labels and its value.
Sample = tuple[str, Labels, float]

_SUFFIXES = {"histogram": ("", "_bucket", "_count", "_sum")}


class Series:
    """One series; made by `Family.join`.

    ``update`` takes a counter's increment, or the next value of a gauge or histogram. It raises
    ValueError for a negative increment. ``update_with`` takes a histogram's value and the request
    it is of. ``total`` is the value, or a histogram's sum.
    """

    __slots__ = (
        "_bounds",
        "_changed",
        "_new",
        "_new_total",
        "_users",
        "counts",
        "exemplar_values",
        "exemplars",
        "family",
        "total",
        "update",
        "update_with",
        "values",
    )

    def __init__(self, family: "Family", values: tuple[str, ...]) -> None:
        self.family = family
        self.values = values
        self.total = 0.0
        is_histogram = family.kind == "histogram"
        self._bounds = family.declared.buckets
        # Of a histogram's buckets; the last is for values above all bounds.
        self.counts = [0] * (len(family.declared.buckets) + 1) if is_histogram else []
        # The latest of each bucket, and its value.
        self.exemplars: list[Exemplar | None] = [None] * len(self.counts)
        self.exemplar_values = [0.0] * len(self.counts)
        self.update: Callable[[float], None] = self._update_first
        self.update_with: Callable[[float, Exemplar], None] = self._update_first
        self._users = 0
        # Since the last `take`: the number of updates, and the sum of their values.
        self._new = 0
        self._new_total = 0.0

    def join(self) -> "Series":
        """Add a user; when the last has left, the series is removed."""
        self._users += 1
        return self

    def leave(self) -> None:
        """Remove a user."""
        self._users -= 1
        if self._users == 0:
            self.update = self.update_with = _ignore
            self.family.remove(self)

    def show(self) -> None:
        """Put the series on the page before its first update."""
        self.family.on_page[self.values] = self

    def take(self) -> float:
        """Return a counter's increment since the last call, a gauge's value, a histogram's mean."""
        kind, new = self.family.kind, self._new_total
        value = self.total if kind == "gauge" else new / self._new if kind == "histogram" else new
        self._new, self._new_total = 0, 0.0
        return value

    def _update_first(self, value: float, exemplar: Exemplar | None = None) -> None:
        self._changed = self.family.changed
        if self.family.kind == "histogram":
            is_logged = isinstance(self._changed, list)
            observe = self._observe_logged if is_logged else self._observe
            observe(value, exemplar)
            self.update = self.update_with = observe
        else:
            update = self._add if self.family.kind == "counter" else self._set
            update(value)
            self.update = update
        self.show()

    # Three times the same lines for the log: a call would cost as much as the rest.

    def _add(self, amount: float) -> None:
        if amount < 0:
            raise ValueError("Counters can only be incremented by non-negative amounts.")
        self.total += amount
        if not self._new:
            self._changed.append(self)
        self._new += 1
        self._new_total += amount

    def _set(self, value: float) -> None:
        self.total = value
        if not self._new:
            self._changed.append(self)
            self._new = 1

    def _observe(self, value: float, exemplar: Exemplar | None = None) -> None:
        self.total += value
        if value == value:  # NaN is in no bucket
            bucket = bisect_left(self._bounds, value)
            self.counts[bucket] += 1
            if exemplar is not None:
                self.exemplars[bucket] = exemplar
                self.exemplar_values[bucket] = value

    def _observe_logged(self, value: float, exemplar: Exemplar | None = None) -> None:
        self._observe(value, exemplar)
        if not self._new:
            self._changed.append(self)
        self._new += 1
        self._new_total += value


class Family:
    """A metric with all its series."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self.name, self.kind, self.help = declared.name, declared.kind, declared.help
        self.on_page: dict[tuple[str, ...], Series] = {}
        #: Collects the series that were updated since their last `take`; without a log of metrics,
        #: a deque without capacity discards them.
        self.changed: list[Series] | deque[Series] = deque(maxlen=0)
        self._series: dict[tuple[str, ...], Series] = {}

    @property
    def is_used(self) -> bool:
        """Whether it has a series."""
        return bool(self._series)

    def join(self, *values: str) -> Series:
        """Return the series of these label values, for a user who calls `Series.leave`."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Series(self, values)
        return series.join()

    def remove(self, series: Series) -> None:
        """Remove a series without users; called by it."""
        del self._series[series.values]
        self.on_page.pop(series.values, None)

    def samples(self) -> Iterator[Sample]:
        """Iterate over the samples on the page; those of one series are of the same moment."""
        names, bounds = self.declared.dimensions, (*self.declared.buckets, float("inf"))
        for values, series in list(self.on_page.items()):
            labels = tuple(zip(names, values, strict=True))
            if self.kind != "histogram":
                yield "", labels, series.total
                continue
            counts, total = list(accumulate(series.counts)), series.total
            for bound, count in zip(bounds, counts, strict=True):
                yield "_bucket", (*labels, ("le", bound)), count
            yield "_count", labels, counts[-1]
            yield "_sum", labels, total

    def exemplars(self) -> Iterator[tuple[Labels, Exemplar, float]]:
        """Iterate over the labels of the buckets with an exemplar, the exemplar and its value."""
        names, bounds = self.declared.dimensions, (*self.declared.buckets, float("inf"))
        for values, series in list(self.on_page.items()):
            labels = tuple(zip(names, values, strict=True))
            for bucket, exemplar in enumerate(series.exemplars):
                if exemplar is not None:
                    le = ("le", bounds[bucket])
                    yield (*labels, le), exemplar, series.exemplar_values[bucket]


@dataclass(frozen=True)
class WatchedGauge:
    """A gauge that is read when the page is: ``read`` returns label values and a number each."""

    name: str
    help: str
    labels: Sequence[str]
    read: Callable[[], Iterable[tuple[Sequence[str], float]]]
    kind: ClassVar = "gauge"

    def samples(self) -> Iterator[Sample]:
        """Iterate over the samples on the page."""
        for values, number in self.read():
            yield "", tuple(zip(self.labels, values, strict=True)), number


class Registry:
    """All metrics of the page, in the order they were added."""

    def __init__(self) -> None:
        self._metrics: dict[str, Family | WatchedGauge] = {}
        #: Of all metrics, with or without samples.
        self.sample_names: set[str] = set()

    def __iter__(self) -> Iterator[Family | WatchedGauge]:
        return iter(list(self._metrics.values()))

    def add(self, declared: Declared) -> Family:
        """Add a metric; raises ValueError if a name is invalid in Prometheus, or taken."""
        names = _sample_names(declared)
        is_taken = names & self.sample_names
        if why := f"{declared.name} exists already" if is_taken else unfit_name(declared):
            raise ValueError(why)
        self.sample_names |= names
        family = self._metrics[declared.name] = Family(declared)
        return family

    def watch(self, gauge: WatchedGauge) -> None:
        """Add a gauge that is read when the page is."""
        self.sample_names.add(gauge.name)
        self._metrics[gauge.name] = gauge

    def discard(self, family: Family) -> None:
        """Remove a metric, if it is there."""
        if self._metrics.get(family.name) is family:
            del self._metrics[family.name]
            self.sample_names -= _sample_names(family.declared)


def _sample_names(metric: Declared) -> set[str]:
    return {metric.name + suffix for suffix in _SUFFIXES.get(metric.kind, ("",))}


def _ignore(_value: float, _exemplar: Exemplar | None = None) -> None:
    """The update of a series that is removed."""
