"""What is counted of the catalog of the models, where there is one."""

from collections.abc import Callable, Iterable, Sequence

from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_config import Declared
from marserve.frontend.telemetry.series import WatchedGauge

_LABELS = ("hostname",)
_COUNTERS = {
    "marserve_catalog_read_failures_total": "Looks at the catalog that failed",
    "marserve_catalog_write_failures_total": "Changes by clients that the catalog did not take",
    "marserve_catalog_failures_total": "Models that could not be brought to what the catalog wants",
}


class CatalogMetrics:
    """Counters and gauges of a catalog, on the page from the start.

    ``pending`` tells how many models are not as it wants them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._host = (metrics.hostname,)
        self._registry = metrics.registry
        series = []
        for name, text in _COUNTERS.items():
            family = metrics.registry.add(Declared("counter", name, "", _LABELS, text=text))
            series.append(family.join(*self._host))
            series[-1].show()
        self.read_failures, self.write_failures, self._failures = series
        self._last_read = 0.0
        self._watch(
            "marserve_catalog_last_read_timestamp_seconds",
            "When the catalog was last read, since the epoch; 0: not yet",
            lambda: self._last_read,
        )

    def watch_pending(self, pending: Callable[[], int]) -> None:
        """Show how many models are not as the catalog wants them."""
        text = "Models that are not as the catalog wants them"
        self._watch("marserve_catalog_pending_models", text, pending)

    def was_read(self, moment: float) -> None:
        """The catalog was read, or is known to be unchanged."""
        self._last_read = moment

    def failed(self) -> None:
        """Count a model that could not be brought to what is wanted."""
        self._failures.update(1)

    def _watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        def samples() -> Iterable[tuple[Sequence[str], float]]:
            return [(self._host, value())]

        self._registry.watch(WatchedGauge(name, text, _LABELS, samples))
