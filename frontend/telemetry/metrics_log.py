"""The metrics as log lines, for ``metrics_mode`` log and legacy.

TorchServe wrote a line for each update. So does this for what handlers report, with the ids of its
requests, and for what is measured of the host; the lines are gathered for a moment and written by
the handful. What the server counts, several times per request, is written once a second where it
has changed: a counter's line carries its increment since the last one, a gauge's its value, a
histogram's the mean of what was observed. So sums over the file and the last value in it are the
same.

The records of both loggers are finished lines, several in one record.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase

from marserve.frontend.logs.setup import timestamp
from marserve.frontend.telemetry.exposition import java_number
from marserve.frontend.telemetry.handler_metrics import Tracked
from marserve.frontend.telemetry.metrics import PREDICTION_TIME, Metrics
from marserve.frontend.telemetry.metrics_config import Declared

server_log = logging.getLogger("TS_METRICS")
model_log = logging.getLogger("MODEL_METRICS")

_INTERVAL_SECONDS = 1.0
# Few, because the loop stands still while they are formatted.
_FLUSH_LINES = 256
_LATER_THAN_LEGACY = frozenset(
    {
        "ts_inference_requests_total",
        "ts_inference_latency_microseconds",
        "ts_queue_latency_microseconds",
    }
)


@dataclass(frozen=True)
class Entry:
    """One line to be.

    Attributes:
        declared: The metric.
        values: Of its dimensions, the host name being the last.
        value: For a counter, the increment.
        at: When, in seconds since the epoch.
        request_ids: Joined by commas; None for a metric of the server, that belongs to no request.
    """

    declared: Declared
    values: tuple[str, ...]
    value: float
    at: float
    request_ids: str | None


Layout = Callable[[Entry], str]
# A histogram's count (0 of the others), and its sum or the others' value.
_Figures = tuple[float, float]
_NOTHING: _Figures = (0.0, 0.0)


class MetricsLog:
    """Writes what has changed.

    Args:
        metrics: What is counted.
        legacy: Leave out the three counters that came after the legacy mode.
        layout: Makes a line of an entry.
    """

    def __init__(
        self, metrics: Metrics, *, legacy: bool = False, layout: Layout | None = None
    ) -> None:
        self._layout = layout or text_line
        self._watched = [
            (declared, metric)
            for declared, metric in metrics.counted()
            if not (legacy and declared.name in _LATER_THAN_LEGACY)
        ]
        self._last: dict[tuple[str, tuple[str, ...]], _Figures] = {}
        self._entries: list[Entry] = []
        metrics.tell(self._note, self.write)

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
        self._entries += self._changes(time.time())
        self._flush()

    def _note(self, tracked: Tracked, value: float, request_ids: str | None) -> None:
        self._entries.append(
            Entry(tracked.declared, tracked.values, value, time.time(), request_ids)
        )
        if len(self._entries) >= _FLUSH_LINES:
            self._flush()

    def _flush(self) -> None:
        entries, self._entries = self._entries, []
        for log, of_server in ((server_log, True), (model_log, False)):
            chosen = [one for one in entries if (one.request_ids is None) is of_server]
            if chosen and log.isEnabledFor(logging.INFO):
                log.info("%s", "\n".join(_printable(self._layout(one)) for one in chosen))

    def _changes(self, now: float) -> Iterator[Entry]:
        last, self._last = self._last, {}
        for declared, metric in self._watched:
            request_ids = "" if declared.name == PREDICTION_TIME else None
            for values, figures in _figures(declared.kind, metric).items():
                key = (declared.name, values)
                self._last[key] = figures
                value = _CHANGE[declared.kind](figures, last.get(key))
                if value is not None:
                    yield Entry(declared, values, value, now, request_ids)


def text_line(entry: Entry) -> str:
    """TorchServe's line."""
    declared, (*values, host) = entry.declared, entry.values
    pairs = zip(declared.dimensions, values, strict=False)
    dimensions = ",".join(f"{name}:{value}" for name, value in pairs)
    request = "" if entry.request_ids is None else f"requestID:{entry.request_ids or 'null'},"
    return (
        f"{timestamp(entry.at)} - {declared.name}.{declared.unit}:{java_number(entry.value)}"
        f"|#{dimensions}|#hostname:{host},{request}timestamp:{int(entry.at)}"
    )


def json_line(entry: Entry) -> str:
    """The members of TorchServe's JSON layout, on one line."""
    declared, (*values, host) = entry.declared, entry.values
    pairs = zip(declared.dimensions, values, strict=False)
    members = {
        "MetricName": declared.name,
        "Value": entry.value,
        "Unit": declared.unit,
        "Type": declared.kind,
        "Dimensions": [{"Name": name, "Value": value} for name, value in pairs],
        "HostName": host,
        "RequestId": entry.request_ids or None,
        "Timestamp": int(entry.at),
    }
    return json.dumps(members, ensure_ascii=False)


def _printable(line: str) -> str:
    """A dimension may have any text for its value; a line break would forge a line."""
    return line if line.isprintable() else ascii(line)[1:-1]


def _figures(kind: str, metric: MetricWrapperBase) -> dict[tuple[str, ...], _Figures]:
    """By the values of the labels, the host's last: the value, or a histogram's count and sum."""
    figures: dict[tuple[str, ...], _Figures] = {}
    for family in metric.collect():
        for sample in family.samples:
            if "le" in sample.labels:
                continue
            values = tuple(sample.labels.values())
            count, total = figures.get(values, (0.0, 0.0))
            if sample.name.endswith("_count") and kind == "histogram":
                figures[values] = sample.value, total
            else:
                figures[values] = count, sample.value
    return figures


def _increment(new: _Figures, old: _Figures | None) -> float | None:
    return new[1] - (old or _NOTHING)[1] or None


def _latest(new: _Figures, old: _Figures | None) -> float | None:
    return None if new == old else new[1]


def _mean(new: _Figures, old: _Figures | None) -> float | None:
    count, total = old or _NOTHING
    observed = new[0] - count
    return (new[1] - total) / observed if observed else None


_CHANGE = {"counter": _increment, "gauge": _latest, "histogram": _mean}
