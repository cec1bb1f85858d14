"""Metrics of one model version: its requests, batches and workers, and what its handler reports."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from marserve.backend.protocol import Reply
from marserve.frontend.telemetry.handler_metrics import ModelRows, parse_metric_line
from marserve.frontend.telemetry.metrics import HOST, MILLISECONDS, REQUEST_COUNTERS, Metrics
from marserve.frontend.telemetry.series import Exemplar, Series

logger = logging.getLogger(__name__)

_MICROSECONDS = 1_000_000
_REJECTED = "marserve_rejected_requests_total"
FAILED = "marserve_failed_requests_total"


@dataclass(frozen=True, slots=True)
class RequestCounters:
    """The counters of requests to one model under one version text, and the model's histograms."""

    _requests: Series
    _latency: Series
    _queue: Series
    _request_seconds: Series
    _queue_seconds: Series

    def accepted(self) -> None:
        """Count a request before it is queued."""
        self._requests.update(1)

    def answered(self, queued: float, total: float, line: Exemplar) -> None:
        """Count a prediction by its seconds in the queue and since arrival.

        Its time line is the exemplar of both histograms.
        """
        self._queue.update(queued * _MICROSECONDS)
        self._latency.update(total * _MICROSECONDS)
        self._queue_seconds.update_with(queued, line)
        self._request_seconds.update_with(total, line)


@dataclass(frozen=True)
class Totals:
    """Totals of a model version; seconds are sums over its batches."""

    requests: int  # answered
    batches: int
    failed: int  # batches that failed, and requests that did not reach a worker
    waited: float  # seconds of each request, in the queue
    took: float  # seconds of each batch, in a worker


class ModelMetrics:
    """The metrics of one model version; its series are on the page until it is closed."""

    def __init__(self, metrics: Metrics, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self._metrics = metrics
        self.declarations = metrics.config.declarations
        self._key = (name, version, metrics.hostname)
        self._rows = ModelRows(metrics.handler_metrics)
        # Measured by the server, although metrics.yaml has it among the handlers' metrics.
        self._prediction_time = self._rows.own("PredictionTime", name, "Model")
        self._queue_time = metrics.queue_time
        self._thread_time = metrics.worker_thread_time
        self._own: list[Series] = []
        self._batch_size = self._join("batch_size")
        self._batch_seconds = self._join("batch_seconds")
        self._request_seconds = self._join("request_seconds")
        self._queue_seconds = self._join("queue_seconds")
        self._handler_seconds = self._join("handler_seconds")
        self._window_seconds = self._join("batch_window_seconds")
        self.failed_batches = self._join("failed_batches_total")
        self.isolated_batches = self._join("isolated_batches_total")
        self.suspected_requests = self._join("suspected_requests_total")
        self.retried_requests = self._join("retried_requests_total")
        self.worker_failures = self._join("worker_failures_total")
        self._load_times: dict[str, Series] = {}
        #: Series that are joined when they are first counted, by metric and reason.
        self._rare: dict[tuple[str, ...], Series] = {}
        self._is_closed = False
        self.versioned = self._request_counters(version)  # requests whose URL names the version
        self.unversioned = self._request_counters("default")

    def batch_done(
        self,
        ids: Iterable[str],
        size: int,
        queued: float,
        seconds: float,
        reply: Reply,
        *,
        held: float = 0.0,
        example: str = "",
    ) -> None:
        """Count a batch of ``size`` jobs that was answered ``seconds`` after it was closed.

        Its last job was queued for ``queued`` seconds, ``held`` of them although a worker was idle.
        The requests' ids are iterated only where there is a log; ``example`` is one of them.
        """
        self._batch_size.update(size)
        self._batch_seconds.update(seconds)
        self._handler_seconds.update_with(reply.handler_ms / MILLISECONDS, (example,))
        if held:
            self._window_seconds.update(held)
        self._queue_time.update(queued * MILLISECONDS)
        if self._prediction_time is not None:
            self._rows.update(self._prediction_time, reply.handler_ms, ids)
        self._thread_time.update(max(0.0, seconds * MILLISECONDS - reply.handler_ms))
        if reply.metrics:
            self._rows.record(reply.metrics)

    def reported(self, rows: list[list[Any]]) -> None:
        """Record metrics that the handler reported outside of a batch that succeeded."""
        self._rows.record(rows)

    def printed(self, line: str) -> None:
        """Record a line with ``[METRICS]`` that a handler printed."""
        row = parse_metric_line(line)
        if row is None:
            logger.error('Failed to parse metrics line: "%s".', line)
        else:
            self.reported([row])

    def rejected(self, reason: str) -> None:
        """Count a request that was answered without having reached a worker."""
        self._count(_REJECTED, reason)

    def request_failed(self, reason: str) -> None:
        """Count a request that a worker had, and that failed."""
        self._count(FAILED, reason)

    def sequence_ended(self, reason: str) -> None:
        """Count a sequence of a stateful model that has ended."""
        self._count("marserve_sequences_ended_total", reason)

    def sequence_end_failed(self) -> None:
        """Count a failure of the handler's ``end_sequence``."""
        self._count("marserve_failed_sequence_ends_total")

    def input_length_failed(self) -> None:
        """Count a failure of the handler's ``input_length``."""
        self._count("marserve_failed_input_lengths_total")

    def worker_loaded(self, worker_name: str, seconds: float) -> None:
        """Record that a worker became READY, ``seconds`` after its process was requested."""
        if self._is_closed:
            return
        if worker_name not in self._load_times:
            series = self._metrics.series("WorkerLoadTime", worker_name, HOST)
            self._load_times[worker_name] = series
        self._load_times[worker_name].update(seconds * MILLISECONDS)

    def worker_gone(self, worker_name: str) -> None:
        """Remove the series of a worker: names are never reused, so they would accumulate."""
        series = self._load_times.pop(worker_name, None)
        if series is not None:
            series.leave()

    def totals(self) -> Totals:
        """Return what was counted so far."""
        rejected = sum(count for (name, _), count in self.errors().items() if name == _REJECTED)
        return Totals(
            requests=round(self._batch_size.total),
            batches=sum(self._batch_seconds.counts),
            failed=round(self.failed_batches.total + rejected),
            waited=self._queue_seconds.total,
            took=self._batch_seconds.total,
        )

    def errors(self) -> dict[tuple[str, str], float]:
        """Return the requests without a prediction, by metric and reason."""
        return {
            (key[0], key[1]): series.total
            for key, series in self._rare.items()
            if key[0] in (_REJECTED, FAILED)
        }

    def latencies(self) -> list[int]:
        """Return how many requests took how long, by the bounds `metrics.SECONDS`."""
        return list(self._request_seconds.counts)

    def close(self) -> None:
        """Remove the series from the page. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._rows.end()
        for series in (*self._own, *self._load_times.values(), *self._rare.values()):
            series.leave()
        self._load_times.clear()
        self._metrics.write_log()

    def _join(self, name: str) -> Series:
        series = self._metrics.added[f"marserve_{name}"].join(*self._key)
        series.show()
        self._own.append(series)
        return series

    def _count(self, name: str, *reason: str) -> None:
        if self._is_closed:
            return
        if (name, *reason) not in self._rare:
            self._rare[name, *reason] = self._metrics.added[name].join(*self._key, *reason)
        self._rare[name, *reason].update(1)

    def _request_counters(self, version_text: str) -> RequestCounters:
        series = [self._metrics.series(name, self.name, version_text) for name in REQUEST_COUNTERS]
        self._own += series
        requests, latency, queue = series
        histograms = self._request_seconds, self._queue_seconds
        return RequestCounters(requests, latency, queue, *histograms)
