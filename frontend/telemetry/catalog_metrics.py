"""Metrics of the catalog of the models, where there is one."""

from collections.abc import Callable

from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_config import counter
from marserve.frontend.telemetry.series import WatchedGauge

_LABELS = ("hostname",)
_COUNTERS = {
    "marserve_catalog_read_failures_total": "Reads of the catalog that failed",
    "marserve_catalog_write_failures_total": "Changes by clients that could not be written",
    "marserve_catalog_failures_total": "Models that could not be changed as the catalog says",
}


class CatalogMetrics:
    """Counters and gauges of a catalog, on the page from the start."""

    def __init__(self, metrics: Metrics) -> None:
        self._host = (metrics.hostname,)
        self._registry = metrics.registry
        series = [
            metrics.registry.add(counter(name, text, _LABELS)).join(*self._host)
            for name, text in _COUNTERS.items()
        ]
        for each in series:
            each.show()
        self.read_failures, self.write_failures, self.failures = series
        self.last_read = 0.0  # or unchanged, in seconds since the epoch
        self._watch(
            "marserve_catalog_last_read_timestamp_seconds",
            "When the catalog was last read, since the epoch; 0: not yet",
            lambda: self.last_read,
        )

    def watch_pending(self, pending: Callable[[], int]) -> None:
        """Show the number of models that differ from the catalog, which ``pending`` returns."""
        text = "Models that differ from the catalog"
        self._watch("marserve_catalog_pending_models", text, pending)

    def _watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        gauge = WatchedGauge(name, text, _LABELS, lambda: [(self._host, value())])
        self._registry.watch(gauge)
