"""What the server counts, under TorchServe's names, on prometheus_client's registry.

Which of TorchServe's metrics there are, of which type and with which labels, is for metrics.yaml to
say (`metrics_config`); code here knows their names and the order of the labels' values. One that
the file leaves out is updated all the same, by a `Series` that goes nowhere. Names that begin with
``marserve_`` are additions. The page is served in every ``metrics_mode``: an empty one by default
was the complaint heard most.

Labels of a model are bound once; per request only numbers are added, and per batch wherever that
will do. When a model version is unregistered its series leave the page.
"""

import contextlib
import logging
import socket
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from marserve.backend.protocol import Reply
from marserve.frontend.telemetry.batch_metrics import BatchMetrics
from marserve.frontend.telemetry.exposition import Registry
from marserve.frontend.telemetry.fast_counters import Update, observing
from marserve.frontend.telemetry.handler_metrics import (
    HandlerMetrics,
    ModelRows,
    Tracked,
    UpdateLog,
)
from marserve.frontend.telemetry.metric_lines import MetricLine, parse_metric_line
from marserve.frontend.telemetry.metrics_config import Declared, MetricsConfig, load_metrics_config
from marserve.frontend.telemetry.series import Series

logger = logging.getLogger(__name__)

#: The counters that came after the mode ``legacy``: there they are on the page, and all others of
#: TorchServe's in the log.
LATER_THAN_LEGACY = frozenset(
    (
        "ts_inference_requests_total",
        "ts_inference_latency_microseconds",
        "ts_queue_latency_microseconds",
    )
)
#: Made by the server itself, though they stand among the handlers' metrics.
PREDICTION_TIME = "PredictionTime"

_HOST = "Host"  # of the label Level
_MODEL = ("model_name", "model_version", "hostname")
_MICROSECONDS = 1_000_000
_MILLISECONDS = 1_000
_MOST_SYSTEM_SERIES = 1_000

Samples = Callable[[], Iterable[tuple[Sequence[str], float]]]


@dataclass(frozen=True)
class RequestCounters:
    """The counters of requests to one model under one version text; times go in as seconds."""

    _requests: Series
    _latency: Series
    _queue: Series

    def accepted(self) -> None:
        """A request was taken in, before it is queued."""
        self._requests.update(1)

    def answered(self, queued: float, total: float) -> None:
        """A prediction is ready: seconds in the queue, seconds since arrival."""
        self._queue.update(queued * _MICROSECONDS)
        self._latency.update(total * _MICROSECONDS)

    def series(self) -> tuple[Series, ...]:
        """All three."""
        return self._requests, self._latency, self._queue


class ModelMetrics:
    """What is counted for one model version, its labels bound.

    Args:
        metrics: Everything that is counted.
        name: Of the model.
        version: Its version.
    """

    def __init__(self, metrics: "Metrics", name: str, version: str) -> None:
        self.name = name
        self.version = version
        self._metrics = metrics
        #: See `MetricsConfig.declarations`.
        self.declarations = metrics.config.declarations
        self._key = (name, version, metrics.hostname)
        self._rows = ModelRows(metrics.handler_metrics)
        self._prediction_time = self._rows.own(PREDICTION_TIME, name, "Model")
        self._queue_time = metrics.queue_time
        self._thread_time = metrics.worker_thread_time
        batches = metrics.batches
        self._observe_size = observing(batches.size.labels(*self._key))
        self._observe_seconds = observing(batches.seconds.labels(*self._key))
        self._observe_queue_seconds = observing(batches.queue_seconds.labels(*self._key))
        self._observe_window_seconds = observing(batches.window_seconds.labels(*self._key))
        self._failed_batches = batches.failed.labels(*self._key)
        self._isolated_batches = batches.isolated.labels(*self._key)
        self._retried_requests = batches.retried.labels(*self._key)
        self._worker_failures = metrics.worker_failures.labels(*self._key)
        self._load_times: dict[str, Series] = {}
        self._reasons: set[str] = set()
        self._is_closed = False
        #: For requests whose URL names the version, and for those that get the default.
        self.versioned = metrics.request_counters(name, version)
        self.unversioned = metrics.request_counters(name, "default")

    def batch_done(
        self,
        ids: Iterable[str],
        size: int,
        queued: float,
        seconds: float,
        reply: Reply,
        *,
        waited: float | None = None,
        held: float = 0.0,
    ) -> None:
        """A batch was answered.

        Args:
            ids: Of its requests; looked at only where there is a log.
            size: Its number of jobs.
            queued: Seconds its last job had waited.
            seconds: From the closing of the batch to its answer.
            reply: What the worker sent, with the handler's time and metrics.
            waited: Seconds its oldest job had waited; None where jobs come and go in between.
            held: For how many of these it was kept although a worker was idle.
        """
        self._observe_size(size)
        self._observe_seconds(seconds)
        if waited is not None:
            self._observe_queue_seconds(waited)
        if held:
            self._observe_window_seconds(held)
        self._queue_time.update(queued * _MILLISECONDS)
        if self._prediction_time is not None:
            self._rows.update(self._prediction_time, reply.handler_ms, ids)
        self._thread_time.update(max(0.0, seconds * _MILLISECONDS - reply.handler_ms))
        if reply.metrics:
            self._rows.record(reply.metrics)

    def with_reply(self, on_reply: Callable[[Reply], None], reply: Reply) -> None:
        """See `Metrics.with_reply`."""
        self._metrics.with_reply(on_reply, reply)

    def batch_failed(self) -> None:
        """A batch got an error as a whole."""
        self._failed_batches.inc()

    def batch_isolated(self) -> None:
        """A failed batch is taken apart, to find the request that is to blame."""
        self._isolated_batches.inc()

    def jobs_retried(self, count: int) -> None:
        """So many jobs are run once more, because their worker died."""
        self._retried_requests.inc(count)

    def reported(self, rows: list[list[Any]]) -> None:
        """The handler reported metrics while it was initialised."""
        self._rows.record(rows)

    def printed(self, line: str) -> None:
        """A handler printed a line that begins with ``[METRICS]``."""
        parsed = parse_metric_line(line)
        if parsed is None:
            logger.error('Failed to parse metrics line: "%s".', line)
        else:
            self.reported([parsed.row])

    def rejected(self, reason: str) -> None:
        """A request was answered without having reached a worker."""
        if not self._is_closed:
            self._reasons.add(reason)
            self._metrics.rejected.labels(*self._key, reason).inc()

    def worker_loaded(self, worker_name: str, seconds: float) -> None:
        """A worker is READY, so long after its process was asked for."""
        series = self._load_times.get(worker_name)
        if series is None:
            series = self._metrics.series("WorkerLoadTime", worker_name, _HOST)
            self._load_times[worker_name] = series
        series.update(seconds * _MILLISECONDS)

    def worker_gone(self, worker_name: str) -> None:
        """A worker will not come back; as ids are never reused, its series would pile up."""
        series = self._load_times.pop(worker_name, None)
        if series is not None:
            series.end()

    def worker_failed(self) -> None:
        """A worker ended unasked, or could not load its model."""
        self._worker_failures.inc()

    def close(self) -> None:
        """The version is served no more: its series leave the page. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._metrics.forget(self)

    def end(self, *, is_last_version: bool, is_last_of_version: bool) -> None:
        """Take the series away that no other registration goes on with."""
        self._rows.end()
        for series in self._load_times.values():
            series.end()
        for counters, is_last in (
            (self.versioned, is_last_of_version),
            (self.unversioned, is_last_version),
        ):
            for series in counters.series():
                series.end() if is_last else series.abandon()
        if is_last_of_version:
            metrics = self._metrics
            for metric in metrics.by_version:
                _remove(metric, self._key)
            for reason in self._reasons:
                _remove(metrics.rejected, (*self._key, reason))


class Metrics:
    """Everything the server counts.

    Args:
        hostname: Value of the labels for it; by default the machine's name.
        config: Which metrics there are; by default the built-in metrics.yaml.
    """

    def __init__(self, hostname: str | None = None, config: MetricsConfig | None = None) -> None:
        self.hostname = hostname or socket.gethostname()
        self.config = config or load_metrics_config()
        self.registry = Registry()
        self._declared = {name: self._make(one) for name, one in self.config.ts.items()}
        self.handler_metrics = HandlerMetrics(self.registry, self.hostname, self.config)
        self._log: UpdateLog | None = None
        #: While a worker's reply is dealt with: its answers are written to the log together.
        self._has_reply_in_hand = False
        self._by_status_class = {
            number: self.series(f"Requests{number}XX", _HOST) for number in (2, 4, 5)
        }
        self.queue_time = self.series("QueueTime", _HOST)
        self.worker_thread_time = self.series("WorkerThreadTime", _HOST)
        self._system: dict[tuple[str, ...], Tracked] = {}
        self._registrations: Tally[tuple[str, str]] = Tally()
        self.batches = BatchMetrics(self.registry)
        self.worker_failures = self._own_counter(
            "marserve_worker_failures_total", "Workers that ended unasked or could not load"
        )
        self.rejected = self._own_counter(
            "marserve_rejected_requests_total",
            "Requests answered without having reached a worker",
            (*_MODEL, "reason"),
        )
        #: Those that are labelled with a model's version and nothing else.
        self.by_version: tuple[MetricWrapperBase, ...] = (
            *self.batches.all(),
            self.worker_failures,
        )

    def count_response(self, status: int) -> None:
        """Count an HTTP response; what is neither 2xx nor 4xx counts as 5XX, as in TorchServe.

        It is in the metrics log afterwards, with all that was counted before; those of one batch
        are written together (`with_reply`).
        """
        by_class = self._by_status_class
        by_class.get(status // 100, by_class[5]).update(1)
        if self._log is not None and not self._has_reply_in_hand:
            self._log.write()

    def with_reply(self, on_reply: Callable[[Reply], None], reply: Reply) -> None:
        """Deal with a worker's reply; what that counts is written to the log in one go.

        The answers are on their way by then, but not out: uvloop sends what is written in a turn of
        the loop when the turn is over.
        """
        self._has_reply_in_hand = True
        try:
            on_reply(reply)
        finally:
            self._has_reply_in_hand = False
            self.write_log()

    def series(self, name: str, *values: str) -> Series:
        """A series of a server's metric.

        Args:
            name: As metrics.yaml declares it; one that it leaves out is not shown.
            *values: Of its dimensions in their order, less the last, which is the host.
        """
        declared, of_all = self.config.ts.get(name), (*values, self.hostname)
        if declared is None:
            return Series("gauge", None, of_all)

        def find_note() -> Update | None:
            return self._log.note_for(declared, of_all) if self._log is not None else None

        return Series(declared.kind, self._declared[name], of_all, find_note)

    def request_counters(self, model: str, version_text: str) -> RequestCounters:
        """The counters of requests to a model, under ``default`` or the version in the URL."""
        return RequestCounters(
            self.series("ts_inference_requests_total", model, version_text),
            self.series("ts_inference_latency_microseconds", model, version_text),
            self.series("ts_queue_latency_microseconds", model, version_text),
        )

    def for_model(self, name: str, version: str) -> ModelMetrics:
        """What is counted for a model version that is being registered; to be closed."""
        self._registrations[name, version] += 1
        return ModelMetrics(self, name, version)

    def forget(self, model: ModelMetrics) -> None:
        """Called by a model version that is served no more."""
        key = (model.name, model.version)
        self._registrations -= Tally([key])  # which also drops what has come to nothing
        model.end(
            is_last_version=all(name != model.name for name, _ in self._registrations),
            is_last_of_version=key not in self._registrations,
        )
        self.write_log()

    def attach(self, log: UpdateLog) -> None:
        """Have updates told to a log; those of series that were begun before are not."""
        self._log = self.handler_metrics.log = log

    def write_log(self) -> None:
        """Have what was counted by now in the log, if there is one, before an answer is sent."""
        if self._log is not None:
            self._log.write()

    def report_system(self, name: str, value: float, *values: str) -> None:
        """Take in a figure about the host; nothing where metrics.yaml does not declare it.

        Args:
            name: Of the metric.
            value: The figure.
            *values: Of its dimensions, less the host.

        Raises:
            ValueError: There are more or fewer of them, or a counter would go down.
        """
        declared = self.config.ts.get(name)
        if declared is None:
            return
        tracked = self._system.get((name, *values)) or self._track_system(declared, values)
        tracked.series.update(value)
        if self._log is not None:
            self._log.report(tracked, value, None)

    def report_line(self, line: MetricLine) -> None:
        """Take in a line of ``system_metrics_cmd``; raises as `report_system`."""
        self.report_system(line.name, line.value, *(value for _, value in line.dimensions))

    def watch(self, name: str, help_text: str, labels: Sequence[str], samples: Samples) -> None:
        """Register a gauge that is looked up when it is asked for."""
        self.registry.register(_Watched(name, help_text, labels, samples))

    def _track_system(self, declared: Declared, values: tuple[str, ...]) -> Tracked:
        name = declared.name
        if len(declared.dimensions) != len(values) + 1:
            raise ValueError(f"the dimensions of {name} are {', '.join(declared.dimensions)}")
        if len(self._system) >= _MOST_SYSTEM_SERIES:
            raise ValueError(f"there are {_MOST_SYSTEM_SERIES} series by now")
        of_all = (*values, self.hostname)
        tracked = Tracked(declared, of_all, Series(declared.kind, self._declared[name], of_all))
        return self._system.setdefault((name, *values), tracked)

    def _make(self, declared: Declared) -> MetricWrapperBase:
        return self.registry.make(
            declared.kind,
            declared.name,
            declared.help,
            declared.dimensions,
            declared.buckets,
        )

    def _own_counter(self, name: str, text: str, labels: Sequence[str] = _MODEL) -> Counter:
        return self.registry.counter(name, text, labels)


class _Watched(Collector):
    def __init__(self, name: str, text: str, labels: Sequence[str], samples: Samples) -> None:
        self._args = (name, text)
        self._labels = labels
        self._samples = samples

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(*self._args, labels=self._labels)
        for values, number in self._samples():
            family.add_metric(values, number)
        yield family


def _remove(metric: MetricWrapperBase, values: Sequence[str]) -> None:
    with contextlib.suppress(KeyError):
        metric.remove(*values)
