"""Metrics as numbers: a registry holds families, a family its series, one for each set of labels.

prometheus_client checks the labels and takes a lock at each update, for several threads may count.
Here one thread counts, the event loop's, a dozen times per prediction, and what a log wants to know
is noted by the same call; so the numbers are kept here (`exposition` writes them out). A series is
shared by all who join it, is on the page from its first update on, and leaves it with the last who
joined: later updates are ignored.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from marserve.frontend.telemetry.metrics_config import Declared, unfit_name

#: What a sample's name ends with, its labels and its value.
Sample = tuple[str, tuple[tuple[str, str | float], ...], float]

_SUFFIXES = {"histogram": ("", "_bucket", "_count", "_sum")}


class Series:
    """One series; made by `Family.join`.

    Attributes:
        family: What it belongs to.
        values: Of its labels, in their order.
        total: The number of a counter or gauge; the sum of a histogram.
        counts: Of a histogram, by bucket; the last is for what is above all bounds.
        update: Takes the next value. Raises ValueError for a counter's negative increment.
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
        """Take part in it, and show it no longer than until everybody has left."""
        self._joined += 1
        return self

    def leave(self) -> None:
        """Take part no more."""
        self._joined -= 1
        if self._joined == 0:
            self.update = _ignore
            self.family.remove(self)

    def show(self) -> None:
        """Have it on the page before its first update."""
        self.family.on_page[self.values] = self

    def take(self) -> float:
        """A counter's increment since the last call, a gauge's value, a histogram's mean."""
        is_mean = self.family.kind == "histogram"
        value = self._new_total / self._new if is_mean else self._new_total
        self._new, self._new_total = 0, 0.0
        return value

    def _update_first(self, value: float) -> None:
        update = {"counter": self._add, "gauge": self._set, "histogram": self._observe}
        if self.family.changed is not None:
            update = {
                "counter": self._add_logged,
                "gauge": self._set_logged,
                "histogram": self._observe_logged,
            }
        chosen = update[self.family.kind]
        chosen(value)
        self.update = chosen
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
    """A metric with all its series.

    Args:
        declared: Its name, type and labels.

    Attributes:
        on_page: The series that the page has, in the order they got there.
        changed: Takes the series that have news for the log; None where there is no log.
    """

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self.name, self.kind, self.help = declared.name, declared.kind, declared.help
        self.on_page: dict[tuple[str, ...], Series] = {}
        self.changed: list[Series] | None = None
        self._series: dict[tuple[str, ...], Series] = {}

    @property
    def is_used(self) -> bool:
        """Whether anybody has joined a series of it."""
        return bool(self._series)

    def join(self, *values: str) -> Series:
        """The series of these labels' values; to be left."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Series(self, values)
        return series.join()

    def remove(self, series: Series) -> None:
        """Called by a series that everybody has left."""
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


class WatchedGauge:
    """A gauge that is looked up when it is asked for.

    Args:
        name: Of the metric.
        help_text: What it is.
        labels: Their names.
        look: Returns the values of the labels and the number, of each series.
    """

    kind = "gauge"

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str],
        look: Callable[[], Iterable[tuple[Sequence[str], float]]],
    ) -> None:
        self.name = name
        self.help = help_text
        self._labels = labels
        self._look = look

    def samples(self) -> Iterator[Sample]:
        """What the page shows of it."""
        for values, number in self._look():
            yield "", tuple(zip(self._labels, values, strict=True)), number


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
        """Add a gauge that is looked up."""
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
    """An update of a series that everybody has left."""
