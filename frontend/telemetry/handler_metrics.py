"""What handlers report: rows from the workers become series, made when they are first seen.

A row is ``[kind, name, unit, value, [[dimension, value], …], [request id, …]]``
(`marserve.backend.metrics`), or comes from a line that a handler printed (`metric_lines`). If
metrics.yaml declares the name, type, unit and names of the dimensions are the file's, and values
belong to them by name where the names are the same, else by position. The host name is the last
label of all, as in TorchServe.

A handler's slip must not cost its requests: what cannot be kept is told once by name. What only
Prometheus cannot carry (a name with a space, one the server has, one with other labels than before)
is left off the page and still has its lines in the log. So has what goes beyond the limits, which
keep a dimension that never repeats from filling the memory.
"""

import logging
import reprlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.metrics import MetricWrapperBase

from marserve.frontend.telemetry.exposition import Registry
from marserve.frontend.telemetry.fast_counters import Update
from marserve.frontend.telemetry.metrics_config import HOSTNAME, KINDS, Declared, MetricsConfig
from marserve.frontend.telemetry.series import Series

logger = logging.getLogger(__name__)

_MOST_NAMES = 1_000
_MOST_SERIES_OF_A_MODEL = 10_000
_LONGEST_NAME = 100  # in what is told
_UNDECLARED = (
    "is left out: declare it under model_metrics of a file that metrics_config names, or set "
    "model_metrics_auto_detect=true"
)

Row = list[Any]
_Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Tracked:
    """A series, on the page or not, as the log shows it; equal to itself only.

    Attributes:
        declared: Its metric.
        values: Of the dimensions, the host name being the last.
        series: Its place on the page.
    """

    declared: Declared
    values: tuple[str, ...]
    series: Series


class UpdateLog(Protocol):
    """Is told of updates: `metrics_log`."""

    def note_for(self, declared: Declared, values: tuple[str, ...]) -> Update | None:
        """What to call with each update of a series of the server's; None for nothing.

        Args:
            declared: Its metric.
            values: Of its dimensions, the host name being the last.
        """

    def report(self, tracked: Tracked, value: float, request_ids: str | None) -> None:
        """Take in an update that has a line of its own.

        Args:
            tracked: The series.
            value: For a counter, the increment.
            request_ids: Joined by commas; None for a metric that belongs to no request.
        """

    def write(self) -> None:
        """Write what was taken in, but where the user allowed for a delay."""


class HandlerMetrics:
    """The metrics of all handlers.

    Args:
        registry: Where they are collected.
        hostname: Value of the label ``Hostname``.
        config: What is declared.
    """

    def __init__(self, registry: Registry, hostname: str, config: MetricsConfig) -> None:
        self._registry = registry
        self.hostname = hostname
        self.config = config
        self.log: UpdateLog | None = None
        self._metrics: dict[str, tuple[Declared, MetricWrapperBase | None]] = {}
        self._owners: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._told: set[str] = set()
        for declared in config.model.values():
            self._make(declared)

    def metric(self, name: str) -> MetricWrapperBase | None:
        """The metric of a name, where there is one that Prometheus can carry."""
        return self._metrics.get(name, (None, None))[1]

    def declaration(self, row: Row) -> Declared | None:
        """What a row's metric is: as the file declares it, or as it was reported; None: drop it.

        Raises:
            ValueError: Nobody declared it, and the row does not tell its type.
        """
        kind, name, unit, _, dimensions, _ = row
        if name in self.config.model:
            return self.config.model[name]
        if not self.config.keeps_undeclared:
            self.tell(name, _UNDECLARED)
            return None
        if kind not in KINDS:
            raise ValueError(f"it is not declared, and its type {kind!r} is none we know")
        labels = tuple(pair[0] for pair in dimensions if pair[0] != HOSTNAME)
        known = self._metrics.get(name)
        if known is not None and set(known[0].dimensions[:-1]) == set(labels):
            return known[0]
        reported = Declared(kind, name, unit, (*labels, HOSTNAME))
        if known is not None:
            self.tell(name, f"was reported before with {known[0].dimensions}, not {labels}")
        elif len(self._metrics) >= _MOST_NAMES + len(self.config.model):
            self.tell("", f"are more than {_MOST_NAMES} by now; the others are only in the log")
        else:
            self._make(reported)
        return reported

    def join(self, declared: Declared, values: tuple[str, ...]) -> Tracked:
        """Take part in a series; it ends when everybody who did has left it."""
        known, metric = self._metrics.get(declared.name, (None, None))
        if known != declared:
            metric = None
        if metric is not None:
            self._owners[declared.name, values] += 1
        return Tracked(declared, values, Series(declared.kind, metric, values))

    def leave(self, tracked: Tracked) -> None:
        """Give a series up, which ends with the last that took part."""
        key = tracked.declared.name, tracked.values
        if key not in self._owners:
            return
        self._owners[key] -= 1
        if self._owners[key]:
            tracked.series.abandon()
            return
        del self._owners[key]
        tracked.series.end()

    def forget_unused(self) -> None:
        """Drop the metrics that nobody declared and that have no series any more."""
        used = {name for name, _ in self._owners}
        for name in self._metrics.keys() - used - self.config.model.keys():
            _, metric = self._metrics.pop(name)
            if metric is not None:
                self._registry.unregister(metric)

    def tell(self, name: str, why: str) -> None:
        """Tell once about a name."""
        name = name[:_LONGEST_NAME]
        if name not in self._told and len(self._told) <= _MOST_NAMES:
            self._told.add(name)
            logger.warning("Metrics of handlers: %s %s.", name or "there", why)

    def _make(self, declared: Declared) -> None:
        metric = None
        try:
            metric = self._registry.make(
                declared.kind,
                declared.name,
                declared.help,
                declared.dimensions,
                declared.buckets,
            )
        except ValueError as error:
            self.tell(declared.name, f"has a log but no place among Prometheus' metrics ({error})")
        self._metrics[declared.name] = declared, metric


class ModelRows:
    """What the handlers of one model version report.

    Args:
        metrics: Those of all handlers.
    """

    def __init__(self, metrics: HandlerMetrics) -> None:
        self._metrics = metrics
        self._tracked: dict[_Key, Tracked | None] = {}
        self._has_ended = False

    def record(self, rows: list[Row]) -> None:
        """Take in the rows of one batch."""
        if self._has_ended:
            return
        for row in rows:
            try:
                tracked = self._find(row)
                if tracked is not None:
                    self.update(tracked, float(row[3]), row[5])
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                self._refuse(row, error)

    def end(self) -> None:
        """The model is served no more: its series leave the page, and no others come."""
        self._has_ended = True
        for tracked in self._tracked.values():
            if tracked is not None:
                self._metrics.leave(tracked)
        self._tracked.clear()
        self._metrics.forget_unused()

    def own(self, name: str, *values: str) -> Tracked | None:
        """A series that the server itself updates; None where it is not declared.

        Args:
            name: Of a metric that the built-in file declares.
            *values: Of its dimensions, less the host.
        """
        declared = self._metrics.config.model.get(name)
        if declared is None:
            return None
        tracked = self._metrics.join(declared, (*values, self._metrics.hostname))
        self._tracked["", name, values] = tracked
        return tracked

    def update(self, tracked: Tracked, value: float, request_ids: Iterable[str]) -> None:
        """Update a series on the page, and in the log if there is one.

        Raises:
            ValueError: A counter would go down.
        """
        tracked.series.update(value)
        log = self._metrics.log
        if log is not None and not self._has_ended:
            log.report(tracked, value, ",".join(request_ids))

    def _find(self, row: Row) -> Tracked | None:
        _, name, _, _, dimensions, _ = row
        key = (name, *[part for pair in dimensions for part in pair])
        try:
            return self._tracked[key]
        except KeyError:
            return self._track(key, row)

    def _track(self, key: _Key, row: Row) -> Tracked | None:
        declared = self._metrics.declaration(row)
        has_room = len(self._tracked) < _MOST_SERIES_OF_A_MODEL
        if declared is None:
            return self._tracked.setdefault(key, None) if has_room else None
        values = (*_values(declared, row[4]), self._metrics.hostname)
        if has_room:
            return self._tracked.setdefault(key, self._metrics.join(declared, values))
        self._metrics.tell(
            declared.name,
            f"has series beyond the {_MOST_SERIES_OF_A_MODEL} of a model, only in the log",
        )
        return Tracked(declared, values, Series(declared.kind, None, values))

    def _refuse(self, row: Row, error: Exception) -> None:
        name = str(row[1]) if isinstance(row, list) and len(row) > 1 else "?"
        shown = reprlib.repr(row)
        self._metrics.tell(name, f"cannot be kept: {shown} ({error})")


def _values(declared: Declared, dimensions: list[list[str]]) -> tuple[str, ...]:
    """The values for a metric's dimensions, the host's left out.

    Raises:
        ValueError: There are more or fewer of them.
    """
    given = [(name, str(value)) for name, value in dimensions if name != HOSTNAME]
    wanted = declared.dimensions[:-1]
    by_name = dict(given)
    if len(by_name) == len(given) and by_name.keys() == set(wanted):
        return tuple(by_name[name] for name in wanted)
    if len(given) != len(wanted):
        raise ValueError(f"its dimensions are {', '.join(wanted) or 'none'}")
    return tuple(value for _, value in given)
