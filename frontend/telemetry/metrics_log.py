"""The metrics as log lines, for ``metrics_mode`` log and legacy.

TorchServe wrote a line for each update, before the answer that it belongs to. Here that is done for
reports of handlers and PredictionTime, with the ids of the requests, and for measurements of the
host. Updates by the server, several per request, are added up between two writes: the line of a
counter has its increment since the last one, that of a gauge its value, that of a histogram the
mean of its new values. So sums over the file and the last value in it equal TorchServe's. Lines are
written before an answer, since uvloop may send at once what a transport gets, or soon (`pace`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from marserve.frontend.logs.formats import log_entries
from marserve.frontend.telemetry.exposition import java_number
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.pace import Pace
from marserve.frontend.telemetry.series import Series

server_log = logging.getLogger("TS_METRICS")
model_log = logging.getLogger("MODEL_METRICS")

_INTERVAL_SECONDS = 1.0
# Few, since they are formatted in the event loop.
_FLUSH_LINES = 256


@dataclass(slots=True)  # frozen ones take three times as long to create
class Entry:
    """One line of the log."""

    series: Series
    value: float  # for a counter, the increment
    at: float  # seconds since the epoch
    request_ids: str | None  # joined by commas; None for a metric of the server

    @property
    def text(self) -> str:
        """TorchServe's line after the time."""
        head, tail = _ends(self.series)
        request = ""
        if self.request_ids is not None:
            request = f"requestID:{_printable(self.request_ids) or 'null'},"
        return f"{head}{java_number(self.value)}{tail}{request}timestamp:{int(self.at)}"

    @property
    def members(self) -> dict[str, Any]:
        """The members of TorchServe's JSON layout."""
        declared, (*values, host) = self.series.family.declared, self.series.values
        pairs = zip(declared.dimensions, values, strict=False)
        return {
            "MetricName": declared.name,
            "Value": self.value,
            "Unit": declared.unit,
            "Type": declared.kind,
            "Dimensions": [{"Name": name, "Value": value} for name, value in pairs],
            "HostName": host,
            "RequestId": self.request_ids or None,
            "Timestamp": int(self.at),
        }


class MetricsLog:
    """Writes counted and reported metrics; a ``legacy`` log has no request counters.

    ``delayed`` lines may be written a second later than the answer that they belong to.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        legacy: bool = False,
        as_json: bool = False,
        delayed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._as_json = as_json
        self._delayed = delayed
        self._pace = Pace(self.flush, clock)
        self._changed = metrics.changed
        self._entries: list[Entry] = []
        metrics.attach(self, legacy=legacy)

    async def run(self) -> None:
        """Write every second what was not written with an answer, until cancelled."""
        try:
            while True:
                await asyncio.sleep(_INTERVAL_SECONDS)
                self.flush()
        finally:
            self.flush()

    def report(self, series: Series, value: float, request_ids: str | None) -> None:
        """Add a line for one update: a counter's increment, or another value."""
        self._entries.append(Entry(series, value, time.time(), request_ids))
        if len(self._entries) >= _FLUSH_LINES:
            self.flush()

    def write(self) -> None:
        """Write the lines before an answer is sent, or soon; called by `Metrics`."""
        if not self._delayed:
            self._pace.answered()

    def flush(self) -> None:
        """Write all lines."""
        if not self._changed and not self._entries:
            return
        entries, self._entries = self._entries, []
        now = time.time()
        of_server = [entry for entry in entries if entry.request_ids is None]
        of_server += [Entry(series, series.take(), now, None) for series in self._changed]
        self._changed.clear()
        log_entries(server_log, of_server, as_json=self._as_json)
        of_models = [entry for entry in entries if entry.request_ids is not None]
        log_entries(model_log, of_models, as_json=self._as_json)


@lru_cache(maxsize=4096)
def _ends(series: Series) -> tuple[str, str]:
    """Return the text before and after the value in the lines of a series."""
    declared, (*values, host) = series.family.declared, series.values
    pairs = ",".join(
        f"{key}:{value}" for key, value in zip(declared.dimensions, values, strict=False)
    )
    return _printable(f"{declared.name}.{declared.unit}:"), _printable(
        f"|#{pairs}|#hostname:{host},"
    )


def _printable(line: str) -> str:
    """Escape control characters: a line break in a value would forge a line."""
    return line if line.isprintable() else ascii(line)[1:-1]
