"""The metrics as log lines, for ``metrics_mode`` log and legacy.

TorchServe wrote a line for each update, before the answer that it belongs to. So does this for what
handlers report and PredictionTime, with the ids of the requests, and for what is measured of the
host. What the server counts, several times per request, is added up for the answers that are sent
together (those of one batch): a counter's line carries its increment since the last one, a gauge's
its value, a histogram's the mean of what was observed. So sums over the file and the last value in
it are TorchServe's, and the lines are in their file when the client has its answer.

To write them with every answer halved what a model that does nothing serves. So the lines of a
thousand answers a second are written with them, and those of further ones together, up to 20 ms
later: who looks into the file after an answer finds its lines, but for a server under such load.
With ``async_logging`` all are written once a second. What this still costs stands in
docs/performance.md.

The records of both loggers are finished lines, several in one record.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from marserve.frontend.logs.lines import log_entries
from marserve.frontend.telemetry.exposition import java_number
from marserve.frontend.telemetry.fast_counters import Update
from marserve.frontend.telemetry.handler_metrics import Tracked
from marserve.frontend.telemetry.metrics import LATER_THAN_LEGACY, Metrics
from marserve.frontend.telemetry.metrics_config import Declared

server_log = logging.getLogger("TS_METRICS")
model_log = logging.getLogger("MODEL_METRICS")

_INTERVAL_SECONDS = 1.0
# Few, because the loop stands still while they are formatted.
_FLUSH_LINES = 256
_PERIOD_SECONDS = 0.02
_WRITES_PER_PERIOD = 20


@dataclass(slots=True)  # not frozen: that makes each cost three times as much
class Entry:
    """One line to be.

    Attributes:
        series: Whose update it is.
        value: For a counter, the increment.
        at: When, in seconds since the epoch.
        request_ids: Joined by commas; None for a metric of the server, that belongs to no request.
    """

    series: "Tracked | _Counted"
    value: float
    at: float
    request_ids: str | None

    @property
    def text(self) -> str:
        """What TorchServe's line says behind the time."""
        head, tail = _ends(self.series)
        request = ""
        if self.request_ids is not None:
            request = f"requestID:{_printable(self.request_ids) or 'null'},"
        return f"{head}{java_number(self.value)}{tail}{request}timestamp:{int(self.at)}"

    @property
    def members(self) -> dict[str, Any]:
        """The members of TorchServe's JSON layout."""
        declared, (*values, host) = self.series.declared, self.series.values
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


class _Counted:
    """What the server counted of a series since it was written last.

    Args:
        declared: Its metric.
        values: Of its dimensions, the host name being the last.
        changed: Where it stands from its first update on until it is written.
    """

    __slots__ = ("_changed", "count", "declared", "total", "values")

    def __init__(
        self, declared: Declared, values: tuple[str, ...], changed: "list[_Counted]"
    ) -> None:
        self.declared = declared
        self.values = values
        self.count = 0
        self.total = 0.0
        self._changed = changed

    def add(self, value: float) -> None:
        """Take in an update of a counter or histogram."""
        if not self.count:
            self._changed.append(self)
        self.count += 1
        self.total += value

    def set(self, value: float) -> None:
        """Take in an update of a gauge."""
        if not self.count:
            self._changed.append(self)
        self.count = 1
        self.total = value

    def take(self, at: float) -> Entry:
        """The line of what was taken in; from now on nothing was."""
        value = self.total / self.count if self.declared.kind == "histogram" else self.total
        self.count, self.total = 0, 0.0
        return Entry(self, value, at, None)


class MetricsLog:
    """Writes what is counted and reported.

    Args:
        metrics: What is counted.
        legacy: Leave out the three counters that came after the legacy mode.
        as_json: Whether lines are JSON objects.
        delayed: Whether lines may be written a second later than the answer they belong to.
        clock: Monotonic seconds, the event loop's.
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
        self._clock = clock
        self._period_ends = 0.0
        self._writes_left = 0
        self._timer: asyncio.TimerHandle | None = None
        self._as_json = as_json
        self._legacy = legacy
        self._delayed = delayed
        self._changed: list[_Counted] = []
        self._entries: list[Entry] = []
        metrics.attach(self)

    async def run(self) -> None:
        """Write what no answer has had written, until cancelled."""
        try:
            while True:
                await asyncio.sleep(_INTERVAL_SECONDS)
                self.flush()
        finally:
            self.flush()

    def note_for(self, declared: Declared, values: tuple[str, ...]) -> Update | None:
        """See `UpdateLog`."""
        if self._legacy and declared.name in LATER_THAN_LEGACY:
            return None
        counted = _Counted(declared, values, self._changed)
        return counted.set if declared.kind == "gauge" else counted.add

    def report(self, tracked: Tracked, value: float, request_ids: str | None) -> None:
        """See `UpdateLog`."""
        self._entries.append(Entry(tracked, value, time.time(), request_ids))
        if len(self._entries) >= _FLUSH_LINES:
            self.flush()

    def write(self) -> None:
        """See `UpdateLog`."""
        if self._delayed or self._timer is not None:
            return
        now = self._clock()
        if now >= self._period_ends:
            self._period_ends = now + _PERIOD_SECONDS
            self._writes_left = _WRITES_PER_PERIOD
        if self._writes_left:
            self._writes_left -= 1
            self.flush()
        else:
            delay = self._period_ends - now
            self._timer = asyncio.get_running_loop().call_later(delay, self._end_period)

    def _end_period(self) -> None:
        self._timer = None
        self.flush()

    def flush(self) -> None:
        """Write what has come up since the last time."""
        if not self._changed and not self._entries:
            return
        entries, self._entries = self._entries, []
        now = time.time()
        entries += [one.take(now) for one in self._changed]
        self._changed.clear()
        for log, of_server in ((server_log, True), (model_log, False)):
            chosen = [one for one in entries if (one.request_ids is None) is of_server]
            log_entries(log, chosen, as_json=self._as_json)


@lru_cache(maxsize=4096)
def _ends(series: Tracked | _Counted) -> tuple[str, str]:
    """What stands before and behind the value in the lines of a series."""
    declared, (*values, host) = series.declared, series.values
    pairs = ",".join(
        f"{key}:{value}" for key, value in zip(declared.dimensions, values, strict=False)
    )
    return _printable(f"{declared.name}.{declared.unit}:"), _printable(
        f"|#{pairs}|#hostname:{host},"
    )


def _printable(line: str) -> str:
    """A dimension may have any text for its value; a line break would forge a line."""
    return line if line.isprintable() else ascii(line)[1:-1]
