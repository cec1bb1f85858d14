"""What the server counts, under TorchServe's names, on prometheus_client's registry.

TorchServe's names stand as they are (``Requests2XX``, without the suffix that Python's client gives
to counters, see `exposition`); names that begin with ``marserve_`` are additions. Prometheus is
always served, whatever ``metrics_mode`` says: an empty page by default was the complaint heard
most.

Labels of a model are bound once, when it is registered (`Metrics.for_model`); per request only
numbers are added, and per batch wherever that will do.
"""

import contextlib
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from marserve.backend.protocol import Reply
from marserve.frontend.telemetry.exposition import Registry
from marserve.frontend.telemetry.handler_metrics import HandlerMetrics

_HOST = ("Level", "Hostname")
_HANDLER = ("ModelName", "Level", "Hostname")
_MODEL = ("model_name", "model_version", "hostname")
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MICROSECONDS = 1_000_000
_MILLISECONDS = 1_000

Samples = Callable[[], Iterable[tuple[Sequence[str], float]]]


@dataclass(frozen=True)
class RequestCounters:
    """The counters of requests to one model under one version text; times go in as seconds."""

    _requests: Counter
    _latency: Counter
    _queue: Counter

    def accepted(self) -> None:
        """A request was taken in, before it is queued."""
        self._requests.inc()

    def answered(self, queued: float, total: float) -> None:
        """A prediction is ready: seconds in the queue, seconds since arrival."""
        self._queue.inc(queued * _MICROSECONDS)
        self._latency.inc(total * _MICROSECONDS)


class ModelMetrics:
    """What is counted for one model version, its labels bound."""

    def __init__(self, metrics: "Metrics", name: str, version: str) -> None:
        host = metrics.hostname
        self._load_time = metrics.worker_load_time
        self._hostname = host
        self._queue_time = metrics.queue_time.labels("Host", host)
        self._prediction_time = metrics.prediction_time.labels(name, "Model", host)
        self._thread_time = metrics.worker_thread_time.labels("Host", host)
        self._batch_size = metrics.batch_size.labels(name, version, host)
        self._batch_seconds = metrics.batch_seconds.labels(name, version, host)
        self._failed_batches = metrics.failed_batches.labels(name, version, host)
        self._worker_failures = metrics.worker_failures.labels(name, version, host)
        self._rejected = metrics.rejected
        self._key = (name, version, host)
        self._handler_metrics = metrics.handler_metrics
        #: For requests whose URL names the version, and for those that get the default.
        self.versioned = metrics.request_counters(name, version)
        self.unversioned = metrics.request_counters(name, "default")

    def batch_done(self, size: int, queued: float, seconds: float, reply: Reply) -> None:
        """A batch was answered.

        Args:
            size: Its number of jobs.
            queued: Seconds its last job had waited.
            seconds: From the closing of the batch to its answer.
            reply: What the worker sent, with the handler's time and metrics.
        """
        self._batch_size.observe(size)
        self._batch_seconds.observe(seconds)
        self._queue_time.set(queued * _MILLISECONDS)
        self._prediction_time.set(reply.handler_ms)
        self._thread_time.set(max(0.0, seconds * _MILLISECONDS - reply.handler_ms))
        if reply.metrics:
            self._handler_metrics.record(reply.metrics)

    def batch_failed(self) -> None:
        """A batch got an error as a whole."""
        self._failed_batches.inc()

    def rejected(self, reason: str) -> None:
        """A request was answered without having reached a worker."""
        self._rejected.labels(*self._key, reason).inc()

    def worker_loaded(self, worker_name: str, seconds: float) -> None:
        """A worker is READY, so long after its process was asked for."""
        gauge = self._load_time.labels(worker_name, "Host", self._hostname)
        gauge.set(seconds * _MILLISECONDS)

    def worker_gone(self, worker_name: str) -> None:
        """A worker will not come back; as ids are never reused, its series would pile up."""
        with contextlib.suppress(KeyError):  # it was never READY
            self._load_time.remove(worker_name, "Host", self._hostname)

    def worker_failed(self) -> None:
        """A worker ended unasked, or could not load its model."""
        self._worker_failures.inc()


class Metrics:
    """Everything the server counts."""

    def __init__(self, hostname: str | None = None) -> None:
        self.hostname = hostname or socket.gethostname()
        self.registry = Registry()
        self._own: set[str] = set()
        self.handler_metrics = HandlerMetrics(self.registry, self.hostname)
        self._by_status_class = {
            2: self._counter("Requests2XX", "Count", _HOST).labels("Host", self.hostname),
            4: self._counter("Requests4XX", "Count", _HOST).labels("Host", self.hostname),
            5: self._counter("Requests5XX", "Count", _HOST).labels("Host", self.hostname),
        }
        self._requests = self._counter("ts_inference_requests_total", "Count", _MODEL)
        self._latency = self._counter("ts_inference_latency_microseconds", "Microseconds", _MODEL)
        self._queue = self._counter("ts_queue_latency_microseconds", "Microseconds", _MODEL)
        self.queue_time = self._gauge("QueueTime", "Milliseconds", _HOST)
        self.worker_thread_time = self._gauge("WorkerThreadTime", "Milliseconds", _HOST)
        self.prediction_time = self.handler_metrics.gauge("PredictionTime", "ms", _HANDLER)
        self.worker_load_time = self._gauge(
            "WorkerLoadTime", "Milliseconds", ("WorkerName", *_HOST)
        )
        self.batch_size = Histogram(
            "marserve_batch_size",
            "Requests that travelled together to a worker",
            _MODEL,
            buckets=_BATCH_SIZES,
            registry=self.registry,
        )
        self.batch_seconds = Histogram(
            "marserve_batch_seconds",
            "Seconds from the closing of a batch to its answer",
            _MODEL,
            registry=self.registry,
        )
        self.failed_batches = self._own_counter(
            "marserve_failed_batches_total", "Batches that got an error as a whole"
        )
        self.worker_failures = self._own_counter(
            "marserve_worker_failures_total", "Workers that ended unasked or could not load"
        )
        self.rejected = self._own_counter(
            "marserve_rejected_requests_total",
            "Requests answered without having reached a worker",
            (*_MODEL, "reason"),
        )

    def count_response(self, status: int) -> None:
        """Count an HTTP response; what is neither 2xx nor 4xx counts as 5XX, as in TorchServe."""
        by_class = self._by_status_class
        by_class.get(status // 100, by_class[5]).inc()

    def request_counters(self, model: str, version_text: str) -> RequestCounters:
        """The counters of requests to a model, under ``default`` or the version in the URL."""
        labels = (model, version_text, self.hostname)
        return RequestCounters(
            self._requests.labels(*labels),
            self._latency.labels(*labels),
            self._queue.labels(*labels),
        )

    def for_model(self, name: str, version: str) -> ModelMetrics:
        """What is counted for a model version that is being registered."""
        return ModelMetrics(self, name, version)

    def host_gauge(self, name: str, unit: str) -> Gauge:
        """A gauge of the whole host."""
        return self._gauge(name, unit, _HOST).labels("Host", self.hostname)

    def is_own(self, name: str) -> bool:
        """Whether a metric is the server's, not a handler's."""
        return name in self._own

    def watch(self, name: str, help_text: str, labels: Sequence[str], samples: Samples) -> None:
        """Register a gauge that is looked up when it is asked for."""
        self.registry.register(_Watched(name, help_text, labels, samples))

    def _counter(self, name: str, unit: str, labels: Sequence[str]) -> Counter:
        self._own.add(name)
        return self.registry.counter(name, _torchserve_help("counter", unit), labels)

    def _gauge(self, name: str, unit: str, labels: Sequence[str]) -> Gauge:
        self._own.add(name)
        return Gauge(name, _torchserve_help("gauge", unit), labels, registry=self.registry)

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


def _torchserve_help(kind: str, unit: str) -> str:
    return f"Torchserve prometheus {kind} metric with unit: {unit}"
