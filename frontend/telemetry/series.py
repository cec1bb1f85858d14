"""Metrics in memory: a registry has families, a family one series for each set of label values.

prometheus_client checks the labels and takes a lock at each update, because several threads may
count. Here only the thread of the event loop counts, a dozen times per prediction, and the same
call updates the numbers for the metrics log. `exposition` writes the page. A series is shared by
all who `join` it. It is on the page from its first update until the last user has left; later
updates are ignored.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from marserve.frontend.telemetry.metrics_config import Declared, unfit_name

#: What a sample's name ends with, its labels and its value.
Sample = tuple[str, tuple[tuple[str, str | float], ...], float]

_SUFFIXES = {"histogram": ("", "_bucket", "_count", "_sum")}


class Series:
    """One series; made by `Family.join`.

    ``update`` takes the next value and raises ValueError for a counter's negative increment;
    ``total`` is a counter's or gauge's number and a histogram's sum, and ``counts`` a histogram's
    buckets, the last for what is above all bounds.
    """

    __slots__ = ("_joined", "_new", "_new_total", "counts", "family", "total", "update", "values")

    def __init__(self, family: "Family", values: tuple[str, ...]) -> None:
        self.family = family
        self.values = values
        self.total = 0.0
        is_histogram = family.kind == "histogram"
        self.counts = [0] * (len(family.declared.buckets) + 1) if is_histogram else []
        self.update: Callable[[float], None] = self._update_first
        self._joined = 0
        # Since it was taken last, for the log: how many updates there were, and what they come to.
        self._new = 0
        self._new_total = 0.0

    def join(self) -> "Series":
        """Add a user; when the last has left, the series is removed."""
        self._joined += 1
        return self

    def leave(self) -> None:
        """Undo one `join`."""
        self._joined -= 1
        if self._joined == 0:
            self.update = _ignore
            self.family.remove(self)

    def show(self) -> None:
        """Put it on the page before its first update."""
        self.family.on_page[self.values] = self

    def take(self) -> float:
        """A counter's increment since the last call, a gauge's value, a histogram's mean."""
        is_mean = self.family.kind == "histogram"
        value = self._new_total / self._new if is_mean else self._new_total
        self._new, self._new_total = 0, 0.0
        return value

    def _update_first(self, value: float) -> None:
        plain, logged = {
            "counter": (self._add, self._add_logged),
            "gauge": (self._set, self._set_logged),
            "histogram": (self._observe, self._observe_logged),
        }[self.family.kind]
        update = plain if self.family.changed is None else logged
        update(value)
        self.update = update
        self.show()

    def _add(self, amount: float) -> None:
        if amount < 0:
            raise ValueError("Counters can only be incremented by non-negative amounts.")
        self.total += amount

    def _set(self, value: float) -> None:
        self.total = value

    def _observe(self, value: float) -> None:
        self.total += value
        if value == value:  # what is not a number is in no bucket
            self.counts[bisect_left(self.family.declared.buckets, value)] += 1

    # The same for series that are in the log; written out, since a call costs more than the rest.

    def _add_logged(self, amount: float) -> None:
        if amount < 0:
            raise ValueError("Counters can only be incremented by non-negative amounts.")
        self.total += amount
        if not self._new:
            self.family.changed.append(self)  # type: ignore[union-attr]  # else it is `_add`
        self._new += 1
        self._new_total += amount

    def _set_logged(self, value: float) -> None:
        self.total = value
        if not self._new:
            self.family.changed.append(self)  # type: ignore[union-attr]  # else it is `_set`
        self._new = 1
        self._new_total = value

    def _observe_logged(self, value: float) -> None:
        self._observe(value)
        if not self._new:
            self.family.changed.append(self)  # type: ignore[union-attr]  # else it is `_observe`
        self._new += 1
        self._new_total += value


class Family:
    """A metric with all its series."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self.name, self.kind, self.help = declared.name, declared.kind, declared.help
        self.on_page: dict[tuple[str, ...], Series] = {}
        #: Takes the series that have news for the log; None where there is no log.
        self.changed: list[Series] | None = None
        self._series: dict[tuple[str, ...], Series] = {}

    @property
    def is_used(self) -> bool:
        """Whether it has a series."""
        return bool(self._series)

    def join(self, *values: str) -> Series:
        """The series of these labels' values; `Series.leave` it in the end."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Series(self, values)
        return series.join()

    def remove(self, series: Series) -> None:
        """Called by a series that has no users any more."""
        del self._series[series.values]
        self.on_page.pop(series.values, None)

    def samples(self) -> Iterator[Sample]:
        """What the page shows of it."""
        names, bounds = self.declared.dimensions, (*self.declared.buckets, float("inf"))
        for values, series in self.on_page.items():
            labels = tuple(zip(names, values, strict=True))
            if self.kind != "histogram":
                yield "", labels, series.total
                continue
            counts = list(accumulate(series.counts))
            for bound, count in zip(bounds, counts, strict=True):
                yield "_bucket", (*labels, ("le", bound)), count
            yield "_count", labels, counts[-1]
            yield "_sum", labels, series.total


@dataclass(frozen=True)
class WatchedGauge:
    """A gauge that is read when the page is: ``read`` returns each series' labels and number."""

    name: str
    help: str
    labels: Sequence[str]
    read: Callable[[], Iterable[tuple[Sequence[str], float]]]
    kind: ClassVar = "gauge"

    def samples(self) -> Iterator[Sample]:
        """What the page shows of it."""
        for values, number in self.read():
            yield "", tuple(zip(self.labels, values, strict=True)), number


class Registry:
    """All metrics of the page, in the order they were added."""

    def __init__(self) -> None:
        self._metrics: dict[str, Family | WatchedGauge] = {}
        self._sample_names: set[str] = set()

    def __iter__(self) -> Iterator[Family | WatchedGauge]:
        return iter(list(self._metrics.values()))

    def add(self, declared: Declared) -> Family:
        """Make a metric.

        Raises:
            ValueError: Prometheus cannot carry the name or a label, or the name is taken.
        """
        names = _sample_names(declared)
        is_taken = names & self._sample_names
        if why := f"{declared.name} is there already" if is_taken else unfit_name(declared):
            raise ValueError(why)
        self._sample_names |= names
        family = self._metrics[declared.name] = Family(declared)
        return family

    def watch(self, gauge: WatchedGauge) -> None:
        """Add a gauge that is read when the page is."""
        self._sample_names.add(gauge.name)
        self._metrics[gauge.name] = gauge

    def discard(self, family: Family) -> None:
        """Take a metric away, if it is there."""
        if self._metrics.get(family.name) is family:
            del self._metrics[family.name]
            self._sample_names -= _sample_names(family.declared)


def _sample_names(metric: Declared) -> set[str]:
    return {metric.name + suffix for suffix in _SUFFIXES.get(metric.kind, ("",))}


def _ignore(_value: float) -> None:
    """The update of a series that is removed."""
