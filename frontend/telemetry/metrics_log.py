"""The metrics as log lines, for ``metrics_mode`` log and legacy.

TorchServe wrote a line for each update, several per request. Here what has changed is written once
a second: a counter's line carries its increment since the last one, a gauge's its value, so sums
over the file and the last value in it are the same.
"""

import asyncio
import logging
import time
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from marserve.frontend.telemetry.metrics import Metrics

server_log = logging.getLogger("TS_METRICS")
model_log = logging.getLogger("MODEL_METRICS")

_INTERVAL_SECONDS = 1.0
_UNIT_MARK = "metric with unit: "
_HOSTNAMES = ("Hostname", "hostname")


class MetricsLog:
    """Writes what has changed.

    Args:
        metrics: What is counted.
        legacy: Leave out the counters whose names begin with ``ts_``.
    """

    def __init__(self, metrics: Metrics, *, legacy: bool = False) -> None:
        self._metrics = metrics
        self._legacy = legacy
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    async def run(self) -> None:
        """Write until cancelled, and what is left then."""
        try:
            while True:
                await asyncio.sleep(_INTERVAL_SECONDS)
                self.write()
        finally:
            self.write()

    def write(self) -> None:
        """Write what has changed since the last time."""
        now = int(time.time())
        for name, family, samples in self._metrics.registry.families():
            # Only TorchServe's own metrics have lines; ours are for Prometheus.
            unit = family.documentation.partition(_UNIT_MARK)[2]
            if unit and not (self._legacy and name.startswith("ts_")):
                for line in self._lines(name, unit, family, samples, now):
                    self._logger_of(name).info("%s", line)

    def _logger_of(self, name: str) -> logging.Logger:
        return server_log if self._metrics.is_own(name) else model_log

    def _lines(
        self,
        name: str,
        unit: str,
        family: Metric,
        samples: list[tuple[str, Sample]],
        now: int,
    ) -> Iterator[str]:
        request = "" if self._metrics.is_own(name) else "requestID:null,"
        for sample_name, sample in samples:
            if sample_name != name:
                continue  # the buckets of a histogram
            key = (name, tuple(sample.labels.values()))
            last = self._last.get(key)
            if sample.value == last or (last is None and not sample.value):
                continue
            self._last[key] = sample.value
            value = sample.value - (last or 0.0) if family.type == "counter" else sample.value
            dimensions = ",".join(
                f"{label}:{text}"
                for label, text in sample.labels.items()
                if label not in _HOSTNAMES
            )
            host = self._metrics.hostname
            yield f"{name}.{unit}:{value}|#{dimensions}|#hostname:{host},{request}timestamp:{now}"
