"""What handlers report: rows from the workers become metrics, made when they are first seen.

A row is ``[kind, name, unit, value, [[dimension, value], …], request ids]``
(`marserve.backend.metrics`). The host name is added as last label, as TorchServe did. A name that
Prometheus cannot carry, or that comes back with other dimensions or another kind, is told once and
then dropped: a handler's slip must not cost its requests.
"""

import logging
from typing import Any

from prometheus_client import Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from marserve.frontend.telemetry.exposition import Registry, check_names

logger = logging.getLogger(__name__)


class HandlerMetrics:
    """The metrics of all handlers.

    Args:
        registry: Where they are collected.
        hostname: Value of the label ``Hostname``.
    """

    def __init__(self, registry: Registry, hostname: str) -> None:
        self._registry = registry
        self._hostname = hostname
        self._metrics: dict[tuple[str, str], MetricWrapperBase] = {}
        self._series: dict[tuple[Any, ...], Any] = {}
        self._told: set[str] = set()

    def record(self, rows: list[list[Any]]) -> None:
        """Take in the rows of one batch."""
        for row in rows:
            try:
                kind, name, unit, value, dimensions, _request_ids = row
                series = self._find(kind, name, unit, dimensions)
                _update(kind, series, value)
            except (ValueError, TypeError, KeyError, AttributeError) as error:  # noqa: PERF203
                self._tell(row, error)

    def gauge(self, name: str, unit: str, labels: tuple[str, ...]) -> Gauge:
        """Make a gauge that counts as the handlers'.

        Raises:
            ValueError: The name is taken or cannot be carried.
        """
        gauge = self._make("gauge", name, unit, labels)
        assert isinstance(gauge, Gauge)
        self._metrics["gauge", name] = gauge
        return gauge

    def _find(self, kind: str, name: str, unit: str, dimensions: list[list[str]]) -> Any:
        labels = tuple(pair[0] for pair in dimensions)
        values = tuple(pair[1] for pair in dimensions)
        key = (kind, name, labels, values)
        series = self._series.get(key)
        if series is None:
            metric = self._metrics.get((kind, name))
            if metric is None:
                metric = self._make(kind, name, unit, (*labels, "Hostname"))
                self._metrics[kind, name] = metric
            by_name = dict(zip(labels, values, strict=True), Hostname=self._hostname)
            series = self._series[key] = metric.labels(**by_name)
        return series

    def _make(self, kind: str, name: str, unit: str, labels: tuple[str, ...]) -> MetricWrapperBase:
        text = f"Torchserve prometheus {kind} metric with unit: {unit}"
        if kind == "counter":
            return self._registry.counter(name, text, labels)
        check_names(name, labels)
        maker = {"gauge": Gauge, "histogram": Histogram}[kind]
        return maker(name, text, labels, registry=self._registry)

    def _tell(self, row: list[Any], error: Exception) -> None:
        name = str(row[1]) if isinstance(row, list) and len(row) > 1 else "?"
        if name not in self._told:
            self._told.add(name)
            logger.warning("A handler reported a metric that cannot be kept: %r (%s)", row, error)


def _update(kind: str, series: Any, value: float) -> None:
    if kind == "counter":
        series.inc(value)
    elif kind == "gauge":
        series.set(value)
    else:
        series.observe(value)
