"""Metrics that handlers report: rows from workers become series when they are first seen.

A row is ``[kind, name, unit, value, [[dimension, value], …], [request id, …]]``
(`marserve.backend.metrics`), or read from a line that a handler or ``system_metrics_cmd`` printed,
where the mark, the type and the ids may be missing:

    [METRICS]NAME.UNIT:VALUE|#dimension:value,…|#type:GAUGE|#hostname:HOST,EPOCH_S,REQUEST_ID,…

If metrics.yaml declares the name, type, unit and names of the dimensions are those of the file.
Values belong to dimensions by name where the names are the same, else by position.

A mistake in a handler's metrics must not fail its requests: it is logged once for each name. What
is invalid in Prometheus is only in the log. So is what exceeds the limits, which keep a dimension
that never repeats from filling the memory.
"""

import logging
import math
import re
import reprlib
from collections.abc import Iterable
from typing import Any, Protocol

from marserve.frontend.telemetry.metrics_config import HOSTNAME, KINDS, Declared, MetricsConfig
from marserve.frontend.telemetry.series import Family, Registry, Series

logger = logging.getLogger(__name__)

_MAX_NAMES = 1_000
_MAX_SERIES_OF_A_MODEL = 10_000
_MAX_LOGGED_NAME = 100
_UNDECLARED = (
    "is left out: declare it under model_metrics of a file that metrics_config names, or set "
    "model_metrics_auto_detect=true"
)

_MARK = "[METRICS]"
_LINE = re.compile(
    r"\s*(?P<name>[\w ]+)\.(?P<unit>[\w ]+):(?P<value>[-\d,.e]+)"
    r"\|#(?P<dimensions>[^|]*)"
    r"(?:\|#type:(?P<kind>\w+))?"
    r"\|#hostname:(?P<hostname>[^,|]+),(?P<timestamp>\d+)(?:,(?P<request_ids>.*))?\s*",
    re.ASCII,
)

Row = list[Any]
_Key = tuple[Any, ...]


class UpdateLog(Protocol):
    """The metrics log (`metrics_log`)."""

    def report(self, series: Series, value: float, request_ids: str | None) -> None:
        """Add a line for one update."""

    def write(self) -> None:
        """Write the lines before an answer is sent, unless a delay is allowed."""


class HandlerMetrics:
    """The metrics of all handlers."""

    def __init__(self, registry: Registry, hostname: str, config: MetricsConfig) -> None:
        self._registry = registry
        self.hostname = hostname
        self.config = config
        self.log: UpdateLog | None = None
        self.families: dict[str, Family] = {}
        self._warned: set[str] = set()
        for declared in config.model.values():
            self._add(declared)

    def find(self, kind: str, name: str, unit: str, dimensions: list[list[str]]) -> Family | None:
        """Return a metric as the file declares it or as it is reported; None if it is left out.

        ValueError: it is not declared, and the reported type is invalid.
        """
        if name in self.config.model:
            return self.families[name]
        if not self.config.keeps_undeclared:
            self.warn(name, _UNDECLARED)
            return None
        if kind not in KINDS:
            raise ValueError(f"it is not declared, and {kind!r} is not a type")
        labels = tuple(label for label, _ in dimensions if label != HOSTNAME)
        known = self.families.get(name)
        if known is not None and set(known.declared.dimensions[:-1]) == set(labels):
            return known
        reported = Declared(kind, name, unit, (*labels, HOSTNAME))
        if known is not None:
            self.warn(name, f"was reported before with {known.declared.dimensions}, not {labels}")
        elif len(self.families) >= _MAX_NAMES + len(self.config.model):
            self.warn("", f"are more than {_MAX_NAMES} names; further ones are only in the log")
        else:
            return self._add(reported)
        return Family(reported)

    def forget_unused(self) -> None:
        """Remove the undeclared metrics that have no series."""
        for name in self.families.keys() - self.config.model.keys():
            if not self.families[name].is_used:
                self._registry.discard(self.families.pop(name))

    def warn(self, name: str, why: str) -> None:
        """Log once about a name, or about all handlers' metrics if it is empty."""
        name = name[:_MAX_LOGGED_NAME]
        if name not in self._warned and len(self._warned) <= _MAX_NAMES:
            self._warned.add(name)
            logger.warning("Metrics of handlers: %s %s.", name or "there", why)

    def _add(self, declared: Declared) -> Family:
        """Add a metric, which is on the page if it is valid in Prometheus."""
        try:
            family = self._registry.add(declared)
        except ValueError as error:
            self.warn(declared.name, f"is in the log, but not on the page ({error})")
            family = Family(declared)
        self.families[declared.name] = family
        return family


class ModelRows:
    """The reports of the handlers of one model version."""

    def __init__(self, metrics: HandlerMetrics) -> None:
        self._metrics = metrics
        self._series: dict[_Key, Series | None] = {}
        self._has_ended = False

    def record(self, rows: list[Row]) -> None:
        """Update the series of the rows of one batch."""
        if self._has_ended:
            return
        for row in rows:
            try:
                kind, name, unit, value, dimensions, request_ids = row
                key = (name, *[part for pair in dimensions for part in pair])
                if key in self._series:
                    series = self._series[key]
                else:
                    family = self._metrics.find(kind, name, unit, dimensions)
                    series = self._join(key, family, dimensions)
                if series is not None:
                    self.update(series, float(value), request_ids)
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
                name = str(row[1]) if isinstance(row, list) and len(row) > 1 else "?"
                self._metrics.warn(name, f"cannot be recorded: {reprlib.repr(row)} ({error})")

    def end(self) -> None:
        """Remove all series; later reports are ignored."""
        self._has_ended = True
        for series in self._series.values():
            if series is not None:
                series.leave()
        self._series.clear()
        self._metrics.forget_unused()

    def own(self, name: str, *values: str) -> Series | None:
        """Return a series that the server itself updates; None where it is not declared."""
        if name not in self._metrics.config.model:
            return None
        family = self._metrics.families[name]
        series = self._series["", name, values] = family.join(*values, self._metrics.hostname)
        return series

    def update(self, series: Series, value: float, request_ids: Iterable[str]) -> None:
        """Update a series on the page and in a log; ValueError if a counter would decrease."""
        series.update(value)
        log = self._metrics.log
        if log is not None and not self._has_ended:
            log.report(series, value, ",".join(request_ids))

    def _join(self, key: _Key, family: Family | None, dimensions: list[list[str]]) -> Series | None:
        is_full = len(self._series) >= _MAX_SERIES_OF_A_MODEL
        series = None
        if family is not None:
            values = (*_values(family.declared, dimensions), self._metrics.hostname)
            if is_full:
                limit = f"{_MAX_SERIES_OF_A_MODEL} of a model"
                self._metrics.warn(family.name, f"has more series than {limit}, only in the log")
                family = Family(family.declared)
            series = family.join(*values)
        return series if is_full else self._series.setdefault(key, series)


def _values(declared: Declared, dimensions: list[list[str]]) -> tuple[str, ...]:
    """Return the values for a metric's dimensions without the host."""
    reported = [(name, str(value)) for name, value in dimensions if name != HOSTNAME]
    names = declared.dimensions[:-1]
    by_name = dict(reported)
    if len(by_name) == len(reported) and by_name.keys() == set(names):
        return tuple(by_name[name] for name in names)
    if len(reported) != len(names):
        raise ValueError(f"its dimensions are {', '.join(names) or 'none'}")
    return tuple(value for _, value in reported)


def parse_metric_line(line: str) -> Row | None:
    """Read a line of text as a row, whose type may be any word; None if it is not a metric."""
    match = _LINE.fullmatch(line.partition(_MARK)[2] if _MARK in line else line)
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    # As in TorchServe, a dimension that is not ``name:value`` is dropped.
    pairs = (part.split(":") for part in match["dimensions"].split(","))
    dimensions = [[pair[0].strip(), pair[1]] for pair in pairs if len(pair) == 2]
    ids = match["request_ids"] or "null"
    request_ids = [] if ids == "null" else ids.split(",")
    kind = (match["kind"] or "").lower()
    return [kind, match["name"], match["unit"], value, dimensions, request_ids]
