"""What a handler reports: collected here, shipped to the frontend inside the reply to its batch.

TorchServe printed every sample as a log line that the frontend parsed back. Here a sample becomes a
row of plain JSON values (`metric_types`), and nothing is printed. What metrics.yaml declares comes
with the `Load`, so that `MetricsStore.get_metric` finds it from the first call on.
"""

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from marserve.backend.errors import MetricsCacheKeyError, MetricsCacheValueError
from marserve.backend.metric_types import (
    EMITTED,
    CachingMetric,
    Dimension,
    Dimensions,
    Metric,
    MetricTypes,
    Row,
    Units,
)

# The modules of TorchServe's metrics are all this one (`handlers.ts`).
__all__ = [
    "CachingMetric",
    "Dimension",
    "Dimensions",
    "Metric",
    "MetricTypes",
    "MetricsStore",
    "Row",
    "Units",
    "emit_metrics",
]

logger = logging.getLogger(__name__)

_TIME_UNITS = ("ms", "s")
_SIZE_UNITS = ("MB", "kB", "GB", "B")


class MetricsStore:
    """What a handler finds as ``context.metrics``.

    ``dimensions`` may be given to every call; ``ModelName`` and ``Level`` are added to them where
    the handler does not set these itself, and the list it passes is left as it was. ``idx`` is the
    place in the batch of the request that was measured; without it, or where there is no such
    place, the sample is about them all.

    Args:
        request_ids: Place in the batch to request id; the context sets it for every batch. Anything
            else that is not None is the one id of whatever is reported, as of a load or of a test.
        model_name: Value of the dimension ``ModelName``.
        declared: The metrics of metrics.yaml, as rows ``[type, name, unit, [dimension, …]]``.
        rows: Where samples are put down.

    Attributes:
        request_ids, model_name: As given.
        cache: The metrics there are, by type and by name.
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
        """What was reported and not handed over yet, one measurement for each series.

        For the tests of handlers, and to look at: passing it to `emit_metrics` reports nothing a
        second time.
        """
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
        """Make a store for a batch beside others: ids of its own, the same metrics and samples."""
        store = copy.copy(self)
        store.request_ids = None
        return store

    def __deepcopy__(self, _memo: dict[int, Any]) -> "MetricsStore":
        """Copied with the context of a request beside others: handlers keep metrics of this one."""
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
        """Report a sample of any type and unit.

        Raises:
            MetricsCacheTypeError: Name, value or type is of the wrong kind.
        """
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
        """Report a time in ``ms`` or ``s``.

        Raises:
            MetricsCacheValueError: Any other unit.
        """
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
        """Report a size in ``MB``, ``kB``, ``GB`` or ``B``.

        Raises:
            MetricsCacheValueError: Any other unit.
        """
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
        """Make a metric to be updated through its own methods; replaces one of the same name.

        Raises:
            MetricsCacheTypeError: Name or type is of the wrong kind.
        """
        metric = CachingMetric(metric_name, unit, dimension_names, metric_type, self._rows)
        known = self.cache.setdefault(metric_type, {})
        if metric_name in known:
            logger.warning("Metric %s is there already and will be replaced.", metric_name)
        known[metric_name] = metric
        return metric

    def get_metric(
        self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER
    ) -> CachingMetric:
        """Return a metric that metrics.yaml declares, or that was added or reported before.

        Raises:
            MetricsCacheKeyError: There is none of that name and type.
        """
        try:
            return self.cache[metric_type][metric_name]
        except KeyError:
            raise MetricsCacheKeyError(
                f"There is no {getattr(metric_type, 'value', metric_type)} {metric_name!r}"
            ) from None

    def drain(self) -> list[Row]:
        """Hand over the samples collected since the last call, oldest first."""
        return _take_all(self._rows) + _take_all(EMITTED)

    def put_back(self, rows: list[Row]) -> None:
        """Take back samples that were handed over too early; they are the oldest again."""
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
        # Handlers in the wild pass a unit where the index belongs, and TorchServe took whatever is
        # no index of the batch for none.
        if idx in ids:
            return str(ids[idx])
        return ",".join(map(str, dict.fromkeys(ids.values())))

    def _with_defaults(self, dimensions: Dimensions, level: str) -> list[Dimension]:
        dimensions = dimensions or ()
        names = {each.name for each in dimensions}
        defaults = Dimension("ModelName", self.model_name), Dimension("Level", level)
        return [*dimensions, *(each for each in defaults if each.name not in names)]


def emit_metrics(metrics: Iterable[Metric] | Mapping[str, Metric] | None) -> None:
    """Report measurements that were made without a context; what is no `Metric` is only logged.

    Raises:
        MetricsCacheTypeError: A name or a value is of the wrong kind.
    """
    measured: Iterable[Any] = metrics.values() if isinstance(metrics, Mapping) else metrics or ()
    for each in measured:
        if not isinstance(each, Metric):
            logger.info("[METRICS]%s", each)
        elif not each.is_reported:
            metric = CachingMetric(each.name, each.unit, (), each.metric_type)
            metric.update(each.value, each.request_id or "", each.dimensions)


def _take_all(rows: list[Row]) -> list[Row]:
    """Empty the list in place, losing nothing that a thread of the handler adds meanwhile."""
    taken = rows[:]
    del rows[: len(taken)]
    return taken


def _check_unit(unit: str, allowed: Sequence[str]) -> None:
    if unit not in allowed:
        raise MetricsCacheValueError(f"The unit is one of {', '.join(allowed)}, not {unit!r}")
