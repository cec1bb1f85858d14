"""What a metric is: its type, unit and dimensions, and the rows that its samples become.

    [type, name, unit, value, [[dimension, value], …], [request id, …]]

``type`` is ``counter``, ``gauge`` or ``histogram``. ``unit`` is spelled out (``Milliseconds`` for
``ms``), as TorchServe's worker did: it names metrics that metrics.yaml does not declare; the unit
of a declared one is the file's. Counters carry the increment. Nothing is summed up in the worker.

A value that no counter or gauge can take (negative increment, NaN) is logged and dropped, because
a metric is no reason to fail a batch. A wrong *type* is a defect in the handler and raises.
"""

import enum
import logging
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marserve.backend.errors import MetricsCacheTypeError

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
#: Samples of `emit_metrics`, which does not know the store they belong to. A worker process has one
#: model and one store, so whichever store is drained next is the right one.
EMITTED: list[Row] = []


class Units:
    """The units that have a short form.

    Attributes:
        units: Short form to what metrics are named by.
    """

    def __init__(self) -> None:
        self.units = dict(_UNITS)


class MetricTypes(enum.Enum):
    """How the samples of a metric add up."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Dimension:
    """A name and a value that set one series of a metric apart from its others."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, Any]:
        """Return it the way TorchServe's JSON layout wrote it."""
        return {"Name": self.name, "Value": self.value}


Dimensions = Sequence[Dimension] | None
"""What calls take; None is none."""


class CachingMetric:
    """A named metric; each update is a sample on its way to the frontend.

    Args:
        metric_name: Its name, as in metrics.yaml.
        unit: Short unit (``ms``) or any text.
        dimension_names: Names that the values of an update stand for, in this order.
        metric_type: How its samples add up.
        rows: Where samples are put down; by default where those of `emit_metrics` are.
    """

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
        """Report a sample with one value per dimension name, in their order.

        Args:
            value: The measurement; for a counter, the increment.
            dimension_values: As many as the metric has dimension names; else the sample is
                logged as an error and dropped.
            request_id: Ids of the requests measured, joined by commas.

        Raises:
            MetricsCacheTypeError: The value is not a number.
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
        """Report a sample with dimensions of its own, whatever the metric's dimension names.

        Raises:
            MetricsCacheTypeError: The value is not a number.
        """
        self._report(value, _pairs(dimensions), request_id)

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
    """A measurement on its own, as handlers of TorchServe's first years wrote them.

    Args:
        name: Metric name.
        value: The measurement so far.
        unit: Short unit (``ms``) or any text.
        dimensions: What sets its series apart.
        request_id: Ids of the requests measured, joined by commas.
        metric_method: ``counter`` for one whose updates add up; else the last one stands.

    Attributes:
        is_reported: Whether it was taken out of a store, which reports it without `emit_metrics`.
    """

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
        self.is_reported = False

    @property
    def metric_type(self) -> MetricTypes:
        """How its samples add up."""
        return MetricTypes.COUNTER if self.metric_method == "counter" else MetricTypes.GAUGE

    def update(self, value: float) -> None:
        """Add to a counter, replace the value of anything else."""
        self.value = self.value + value if self.metric_type is MetricTypes.COUNTER else value

    def reset(self) -> None:
        """Start again from zero."""
        self.value = 0

    def __str__(self) -> str:
        described = ",".join(map(str, self.dimensions))
        ids = f",{self.request_id}" if self.request_id else ""
        return (
            f"{self.name}.{self.unit}:{self.value}|#{described}|"
            f"#hostname:{socket.gethostname()},{int(time.time())}{ids}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it the way TorchServe's JSON layout wrote it; the timestamp is in seconds."""
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": [dimension.to_dict() for dimension in self.dimensions],
            "HostName": socket.gethostname(),
            "RequestId": self.request_id,
            "Timestamp": int(time.time()),
        }


def _pairs(dimensions: Dimensions) -> list[list[str]]:
    return [[each.name, str(each.value)] for each in dimensions or ()]


def _number(name: str, value: Any) -> float:
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass  # told below, like any other value that is no number
    raise MetricsCacheTypeError(f"Metric {name} takes a number, not {value!r}")
