"""What is counted of one model version: requests, batches, workers, and what handlers report.

Labels are bound once; per request only numbers are added, and per batch wherever that will do.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from marserve.backend.protocol import Reply
from marserve.frontend.telemetry.handler_metrics import ModelRows, parse_metric_line
from marserve.frontend.telemetry.metrics import HOST, MILLISECONDS, REQUEST_COUNTERS, Metrics
from marserve.frontend.telemetry.series import Family, Series

logger = logging.getLogger(__name__)

_MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class RequestCounters:
    """The counters of requests to one model under one version text."""

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


@dataclass(frozen=True)
class Totals:
    """What was counted of a model version; seconds are summed over its batches.

    Attributes:
        requests, batches: That were answered.
        failed: Batches that failed, and requests that never reached a worker.
        waited: Of the oldest request of each batch, in the queue.
        took: Of each batch, in a worker.
    """

    requests: int
    batches: int
    failed: int
    waited: float
    took: float


class ModelMetrics:
    """What is counted for one model version; its series are on the page until it is closed."""

    def __init__(self, metrics: Metrics, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self._metrics = metrics
        #: See `MetricsConfig.declarations`.
        self.declarations = metrics.config.declarations
        self._key = (name, version, metrics.hostname)
        self._rows = ModelRows(metrics.handler_metrics)
        # Measured by the server, though it is among the handlers' metrics.
        self._prediction_time = self._rows.own("PredictionTime", name, "Model")
        self._queue_time = metrics.queue_time
        self._thread_time = metrics.worker_thread_time
        self._own: list[Series] = [family.join(*self._key) for family in metrics.added]
        for series in self._own:
            series.show()
        (
            self._batch_size,
            self._batch_seconds,
            self._queue_seconds,
            self._window_seconds,
            self._failed_batches,
            self._isolated_batches,
            self._suspected_requests,
            self._retried_requests,
            self._worker_failures,
        ) = self._own
        self._load_times: dict[str, Series] = {}
        #: What is counted only where it happens, by family and reason.
        self._rare: dict[tuple[str, ...], Series] = {}
        self._is_closed = False
        #: For requests whose URL names the version, and for those that get the default.
        self.versioned = self._request_counters(version)
        self.unversioned = self._request_counters("default")

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
        """A batch of so many jobs was answered, ``seconds`` after it was closed.

        Its last job had been queued for ``queued`` seconds and its oldest for ``waited`` (None
        where jobs come and go in between), ``held`` of them although a worker was idle. The
        requests' ids are iterated only where there is a log.
        """
        self._batch_size.update(size)
        self._batch_seconds.update(seconds)
        if waited is not None:
            self._queue_seconds.update(waited)
        if held:
            self._window_seconds.update(held)
        self._queue_time.update(queued * MILLISECONDS)
        if self._prediction_time is not None:
            self._rows.update(self._prediction_time, reply.handler_ms, ids)
        self._thread_time.update(max(0.0, seconds * MILLISECONDS - reply.handler_ms))
        if reply.metrics:
            self._rows.record(reply.metrics)

    def batch_failed(self) -> None:
        """A batch got an error as a whole."""
        self._failed_batches.update(1)

    def batch_isolated(self) -> None:
        """A failed batch is taken apart, to find the request that is to blame."""
        self._isolated_batches.update(1)

    def job_suspected(self) -> None:
        """A request runs alone because the same content had failed alone."""
        self._suspected_requests.update(1)

    def jobs_retried(self, count: int) -> None:
        """So many jobs are run once more, because their worker died."""
        self._retried_requests.update(count)

    def reported(self, rows: list[list[Any]]) -> None:
        """The handler reported metrics while it was initialised."""
        self._rows.record(rows)

    def printed(self, line: str) -> None:
        """A handler printed a line with ``[METRICS]``."""
        row = parse_metric_line(line)
        if row is None:
            logger.error('Failed to parse metrics line: "%s".', line)
        else:
            self.reported([row])

    def rejected(self, reason: str) -> None:
        """A request was answered without having reached a worker."""
        self._count(self._metrics.rejected, reason)

    def sequence_ended(self, reason: str) -> None:
        """A sequence of a stateful model is over."""
        self._count(self._metrics.sequences_ended, reason)

    def sequence_end_failed(self) -> None:
        """The handler failed when it was told that a sequence is over."""
        self._count(self._metrics.failed_sequence_ends)

    def input_length_failed(self) -> None:
        """The handler could not tell the length of an input."""
        self._count(self._metrics.failed_input_lengths)

    def _count(self, family: Family, *reason: str) -> None:
        if self._is_closed:
            return
        key = (family.declared.name, *reason)
        if key not in self._rare:
            self._rare[key] = family.join(*self._key, *reason)
        self._rare[key].update(1)

    def worker_loaded(self, worker_name: str, seconds: float) -> None:
        """A worker is READY, so long after its process was asked for."""
        if self._is_closed:
            return
        if worker_name not in self._load_times:
            series = self._metrics.series("WorkerLoadTime", worker_name, HOST)
            self._load_times[worker_name] = series
        self._load_times[worker_name].update(seconds * MILLISECONDS)

    def worker_gone(self, worker_name: str) -> None:
        """A worker will not come back; as ids are never reused, its series would pile up."""
        series = self._load_times.pop(worker_name, None)
        if series is not None:
            series.leave()

    def worker_failed(self) -> None:
        """A worker ended unasked, or could not load its model."""
        self._worker_failures.update(1)

    def totals(self) -> Totals:
        """What was counted so far."""
        family = self._metrics.rejected
        rejected = sum(each.total for each in self._rare.values() if each.family is family)
        return Totals(
            requests=round(self._batch_size.total),
            batches=sum(self._batch_seconds.counts),
            failed=round(self._failed_batches.total + rejected),
            waited=self._queue_seconds.total,
            took=self._batch_seconds.total,
        )

    def close(self) -> None:
        """The version is served no more: its series leave the page. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._rows.end()
        for series in (*self._own, *self._load_times.values(), *self._rare.values()):
            series.leave()
        self._load_times.clear()
        self._metrics.write_log()

    def _request_counters(self, version_text: str) -> RequestCounters:
        series = [self._metrics.series(name, self.name, version_text) for name in REQUEST_COUNTERS]
        self._own += series
        return RequestCounters(*series)
