"""Metrics of handlers: collected here, and sent to the frontend in the reply to the batch.

A sample is a row of JSON values; nothing is printed or summed up in the worker::

    [type, name, unit, value, [[dimension, value], …], [request id, …]]

``type`` is ``counter`` (whose value is the increment), ``gauge`` or ``histogram``. ``unit`` is
written in full (``Milliseconds`` for ``ms``), as by TorchServe's worker.

Invalid values (a negative increment, NaN) are logged and dropped, and do not fail a batch. A wrong
type or unit is a defect of the handler and raises an error.
"""

import copy
import enum
import logging
import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marserve.backend.errors import (
    MetricsCacheKeyError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)

logger = logging.getLogger(__name__)

Row = list[Any]

_UNITS: dict[str | None, str] = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "percent": "Percent",
    "count": "Count",
    "MB": "Megabytes",
    "GB": "Gigabytes",
    "kB": "Kilobytes",
    "B": "Bytes",
    "": "unit",
    None: "unit",
}
#: Samples of `emit_metrics`, which has no store; drained with the only store of the worker.
EMITTED: list[Row] = []


def is_about(row: Row, ids: set[str]) -> bool:
    """Return whether a row is about any of these requests, or about none; so are malformed ones."""
    try:
        return not row[5] or not ids.isdisjoint(row[5])
    except (IndexError, TypeError):
        return True


class Units:
    """The units with a short form, and their names in metrics."""

    def __init__(self) -> None:
        self.units = dict(_UNITS)


class MetricTypes(enum.Enum):
    """The types of metrics: how their samples are combined."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Dimension:
    """A name and a value that identify a series of a metric."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, Any]:
        """Return the dimension as in TorchServe's JSON layout."""
        return {"Name": self.name, "Value": self.value}


Dimensions = Sequence[Dimension] | None


class CachingMetric:
    """A named metric; each update is a sample for the frontend."""

    def __init__(
        self,
        metric_name: str,
        unit: str | None,
        dimension_names: Sequence[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
        rows: list[Row] | None = None,
    ) -> None:
        if not isinstance(metric_name, str):
            raise MetricsCacheTypeError(f"A metric's name is a str, not {metric_name!r}")
        if not isinstance(metric_type, MetricTypes):
            raise MetricsCacheTypeError(f"metric_type is one of MetricTypes, not {metric_type!r}")
        self.metric_name = metric_name
        self.unit = _UNITS.get(unit) or str(unit)
        self.dimension_names = list(dimension_names or ())
        self.metric_type = metric_type
        self._rows = EMITTED if rows is None else rows

    def add_or_update(
        self, value: float, dimension_values: Sequence[Any] | None = (), request_id: str = ""
    ) -> None:
        """Report a sample with one value per dimension name.

        ``request_id`` contains the ids of the measured requests, separated by commas.
        """
        values = dimension_values or ()
        if len(values) != len(self.dimension_names):
            logger.error(
                "Metric %s has the dimensions %s, so the values %s do not fit; sample dropped.",
                self.metric_name,
                self.dimension_names,
                list(values),
            )
            return
        pairs = zip(self.dimension_names, values, strict=True)
        self._report(value, [[name, str(item)] for name, item in pairs], request_id)

    def update(self, value: float, request_id: str = "", dimensions: Dimensions = ()) -> None:
        """Report a sample with other dimensions than those of the metric."""
        self._report(value, [[each.name, str(each.value)] for each in dimensions or ()], request_id)

    def _report(self, value: float, pairs: list[list[str]], request_id: str) -> None:
        number = _number(self.metric_name, value)
        if not math.isfinite(number):
            logger.error("Metric %s cannot be %s; sample dropped.", self.metric_name, number)
        elif number < 0 and self.metric_type is MetricTypes.COUNTER:
            logger.error(
                "Counter metric update value cannot be negative: %s, %s", self.metric_name, number
            )
        else:
            ids = request_id.split(",") if request_id else []
            kind = self.metric_type.value
            self._rows.append([kind, self.metric_name, self.unit, number, pairs, ids])


class Metric:
    """A single measurement, as handlers for early versions of TorchServe make them."""

    def __init__(
        self,
        name: str,
        value: float,
        unit: str | None,
        dimensions: Dimensions,
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.name = name
        self.value = value
        self.unit = _UNITS.get(unit) or str(unit)
        self.dimensions = list(dimensions or ())
        self.request_id = request_id
        self.metric_method = metric_method
        self.is_reported = False  # by a store, without `emit_metrics`

    @property
    def metric_type(self) -> MetricTypes:
        """The type of the metric."""
        return MetricTypes.COUNTER if self.metric_method == "counter" else MetricTypes.GAUGE

    def update(self, value: float) -> None:
        """Add to a counter, or replace the value of another type."""
        self.value = self.value + value if self.metric_type is MetricTypes.COUNTER else value

    def reset(self) -> None:
        """Set the value to 0."""
        self.value = 0

    def __str__(self) -> str:
        described = ",".join(map(str, self.dimensions))
        ids = f",{self.request_id}" if self.request_id else ""
        return (
            f"{self.name}.{self.unit}:{self.value}|#{described}|"
            f"#hostname:{socket.gethostname()},{int(time.time())}{ids}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as in TorchServe's JSON layout; the timestamp is in seconds."""
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": [dimension.to_dict() for dimension in self.dimensions],
            "HostName": socket.gethostname(),
            "RequestId": self.request_id,
            "Timestamp": int(time.time()),
        }


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
        return int(value) if isinstance(value, int) else number
    except OverflowError:  # of an int with hundreds of digits
        return math.inf
    except (TypeError, ValueError):
        pass
    raise MetricsCacheTypeError(f"Metric {name} takes a number, not {value!r}")


_TIME_UNITS = ("ms", "s")
_SIZE_UNITS = ("MB", "kB", "GB", "B")


class MetricsStore:
    """The metrics of a handler, ``context.metrics``.

    Methods take ``dimensions``, to which ``ModelName`` and ``Level`` are added unless they are
    among them, and ``idx``, the place in the batch of the measured request; without it, or if there
    is no such place, the sample is about all requests.

    Args:
        request_ids: By place in the batch; or one id for all samples, as of a load or a test.
        declared: The metrics of metrics.yaml, as rows ``[type, name, unit, [dimension, …]]``.
        rows: Where samples are collected.
    """

    def __init__(
        self,
        request_ids: Any = None,
        model_name: str = "",
        declared: Iterable[Sequence[Any]] = (),
        rows: list[Row] | None = None,
    ) -> None:
        self.request_ids = request_ids
        self.model_name = model_name
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {}
        self._rows: list[Row] = [] if rows is None else rows
        for kind, name, unit, dimensions in declared:
            self.add_metric_to_cache(name, unit, dimensions, MetricTypes(kind))

    @property
    def store(self) -> list[Metric]:
        """The samples that are not drained, one measurement for each series; for tests."""
        series: dict[str, Metric] = {}
        for kind, name, unit, value, pairs, ids in self._rows:
            key = repr((kind, name, unit, pairs, ids))
            if key in series:
                series[key].update(value)
                continue
            dimensions = [Dimension(*pair) for pair in pairs]
            method = "counter" if kind == MetricTypes.COUNTER.value else None
            series[key] = Metric(name, value, unit, dimensions, ",".join(ids) or None, method)
            series[key].is_reported = True
        return list(series.values())

    def set_request_ids(self, request_ids: Any) -> None:
        """Set `request_ids`."""
        self.request_ids = request_ids

    def for_batch(self) -> "MetricsStore":
        """Return a store for a batch beside others: separate ids, the same metrics and samples."""
        store = copy.copy(self)
        store.request_ids = None
        return store

    def __deepcopy__(self, _memo: dict[int, Any]) -> "MetricsStore":
        """Return `for_batch`: handlers keep metrics of this store."""
        return self.for_batch()

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: Dimensions = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Report a sample of any type and unit."""
        request_id = self._request_id(idx)
        described = self._with_defaults(dimensions, "Model" if request_id else "Error")
        self._metric(name, unit, metric_type).update(value, request_id, described)

    def add_counter(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Dimensions = (),
    ) -> None:
        """Report an increment."""
        self.add_metric(name, value, "count", idx, dimensions)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Dimensions = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Report a time in ``ms`` or ``s``."""
        _check_unit(unit, _TIME_UNITS)
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Dimensions = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Report a size in ``MB``, ``kB``, ``GB`` or ``B``."""
        _check_unit(unit, _SIZE_UNITS)
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Dimensions = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Report a percentage, 0 to 100."""
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(self, name: str, value: float, dimensions: Dimensions = ()) -> None:
        """Report errors: a counter of level ``Error`` that belongs to no request."""
        described = self._with_defaults(dimensions, "Error")
        self._metric(name, "", MetricTypes.COUNTER).update(value, dimensions=described)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] | None = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """Return a new metric; replaces one of the same name and type."""
        metric = CachingMetric(metric_name, unit, dimension_names, metric_type, self._rows)
        known = self.cache.setdefault(metric_type, {})
        if metric_name in known:
            logger.warning("Metric %s exists and is replaced.", metric_name)
        known[metric_name] = metric
        return metric

    def get_metric(
        self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER
    ) -> CachingMetric:
        """Return a metric that exists; raises MetricsCacheKeyError."""
        try:
            return self.cache[metric_type][metric_name]
        except KeyError:
            raise MetricsCacheKeyError(
                f"There is no {getattr(metric_type, 'value', metric_type)} {metric_name!r}"
            ) from None

    def drain(self) -> list[Row]:
        """Return and remove the collected samples, oldest first."""
        return _take_all(self._rows) + _take_all(EMITTED)

    def put_back(self, rows: list[Row]) -> None:
        """Insert samples that were drained too early, as the oldest."""
        self._rows[:0] = rows

    def _metric(self, name: str, unit: str, metric_type: MetricTypes) -> CachingMetric:
        known = self.cache.get(metric_type, {}).get(name)
        return known or self.add_metric_to_cache(name, unit, ["ModelName", "Level"], metric_type)

    def _request_id(self, idx: int | None) -> str:
        ids = self.request_ids
        if not ids:
            return ""
        if not isinstance(ids, dict):
            return str(ids)
        # Handlers pass a unit instead of the index, and TorchServe ignores an invalid index.
        if idx in ids:
            return str(ids[idx])
        return ",".join(map(str, dict.fromkeys(ids.values())))

    def _with_defaults(self, dimensions: Dimensions, level: str) -> list[Dimension]:
        dimensions = dimensions or ()
        names = {each.name for each in dimensions}
        defaults = Dimension("ModelName", self.model_name), Dimension("Level", level)
        return [*dimensions, *(each for each in defaults if each.name not in names)]


def emit_metrics(metrics: Iterable[Metric] | Mapping[str, Metric] | None) -> None:
    """Report measurements made without a context; values of other types are only logged."""
    measured: Iterable[Any] = metrics.values() if isinstance(metrics, Mapping) else metrics or ()
    for each in measured:
        if not isinstance(each, Metric):
            logger.info("[METRICS]%s", each)
        elif not each.is_reported:
            metric = CachingMetric(each.name, each.unit, (), each.metric_type)
            metric.update(each.value, each.request_id or "", each.dimensions)


def _take_all(rows: list[Row]) -> list[Row]:
    """Empty the list in place; rows that another thread appends meanwhile are kept."""
    taken = rows[:]
    del rows[: len(taken)]
    return taken


def _check_unit(unit: str, allowed: Sequence[str]) -> None:
    if unit not in allowed:
        raise MetricsCacheValueError(f"The unit is one of {', '.join(allowed)}, not {unit!r}")
