"""The server's counters and gauges, under TorchServe's names.

metrics.yaml decides which of TorchServe's metrics there are, their types and labels
(`metrics_config`); code here has their names and the order of the labels' values. A metric that the
file leaves out is updated in a series that is not on the page. Names that begin with ``marserve_``
are additions. The page is complete in every ``metrics_mode``; TorchServe's is empty by default.
"""

import socket
from collections.abc import Callable, Iterable

from marserve.frontend.telemetry.handler_metrics import HandlerMetrics, UpdateLog
from marserve.frontend.telemetry.metrics_config import (
    Declared,
    MetricsConfig,
    counter,
    histogram,
    load_metrics_config,
)
from marserve.frontend.telemetry.series import Family, Registry, Series, WatchedGauge

#: They are newer than the mode ``legacy``: there they are on the page, and all others of
#: TorchServe's in the log.
REQUEST_COUNTERS = (
    "ts_inference_requests_total",
    "ts_inference_latency_microseconds",
    "ts_queue_latency_microseconds",
)
#: Of the label Level.
HOST = "Host"
MILLISECONDS = 1_000
# Updated by requests, not by a timer: the log has the sums of their updates.
_COUNTED = (
    "Requests2XX",
    "Requests4XX",
    "Requests5XX",
    "QueueTime",
    "WorkerThreadTime",
    "WorkerLoadTime",
)
_MAX_SYSTEM_SERIES = 1_000
#: Bounds of histograms of seconds, three in each power of ten.
SECONDS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    60.0,
)
_MODEL = ("model_name", "model_version", "hostname")
_HOSTNAME = ("hostname",)
_NODE = ("workflow_name", "node", "hostname")
_SIZES = tuple(1 << power for power in range(11))  # as BentoML's monitoring
_HELD = "Seconds that batches were held although a worker was idle; only of those"
_ISOLATED = "Failed batches that were split to find the requests that fail"
_SUSPECTED = "Requests run alone because the same content had failed alone"
_ADDED = (
    histogram("marserve_batch_size", "Requests of a batch", _MODEL, _SIZES),
    histogram("marserve_batch_seconds", "Seconds from closing a batch to its answer", _MODEL),
    histogram(
        "marserve_request_seconds",
        "Seconds from the arrival of a request to its answer",
        _MODEL,
        SECONDS,
    ),
    histogram(
        "marserve_queue_seconds", "Seconds that a request waited in the queue", _MODEL, SECONDS
    ),
    histogram("marserve_handler_seconds", "Seconds of a batch in the handler", _MODEL, SECONDS),
    histogram("marserve_batch_window_seconds", _HELD, _MODEL, SECONDS),
    counter("marserve_failed_batches_total", "Batches that got an error as a whole", _MODEL),
    counter("marserve_isolated_batches_total", _ISOLATED, _MODEL),
    counter("marserve_suspected_requests_total", _SUSPECTED, _MODEL),
    counter(
        "marserve_retried_requests_total", "Requests whose worker died and that ran again", _MODEL
    ),
    counter("marserve_worker_failures_total", "Workers that died or could not load", _MODEL),
    counter(
        "marserve_rejected_requests_total",
        "Requests that were answered without a worker",
        (*_MODEL, "reason"),
    ),
    counter(
        "marserve_failed_requests_total",
        "Requests that a worker had, and that were not answered by the handler, or with a failure",
        (*_MODEL, "reason"),
    ),
    counter("marserve_sequences_ended_total", "Ended sequences, by reason", (*_MODEL, "reason")),
    counter("marserve_failed_sequence_ends_total", "Failures of end_sequence", _MODEL),
    counter("marserve_failed_input_lengths_total", "Failures of input_length", _MODEL),
    counter(
        "marserve_limits_reached_total",
        "Connections and requests that reached a limit of their listener",
        ("listener", "limit", "hostname"),
    ),
    counter(
        "marserve_fork_server_replacements_total",
        "Fork servers that died, or were killed because they did not answer",
        _HOSTNAME,
    ),
    counter(
        "marserve_dropped_spans_total",
        "Spans that were not sent: their receiver is down or slow, or they are too many",
        _HOSTNAME,
    ),
    counter(
        "marserve_workflow_runs_total",
        "Runs of a workflow by how they ended",
        ("workflow_name", "outcome", "hostname"),
    ),
    histogram(
        "marserve_workflow_run_seconds",
        "Seconds from the arrival of a request to the end of its run",
        ("workflow_name", "hostname"),
    ),
    histogram(
        "marserve_workflow_node_seconds",
        "Seconds from the input of a node to its output, all tries included",
        _NODE,
    ),
    counter(
        "marserve_workflow_failed_tries_total",
        "Tries of a node that failed or took too long",
        _NODE,
    ),
)
_OF_CATALOG = {
    "marserve_catalog_read_failures_total": "Reads of the catalog that failed",
    "marserve_catalog_failures_total": "Models that could not be changed as the catalog says",
}
_OUTCOMES = ("answered", "failed", "expired", "cancelled", "refused")


class Metrics:
    """All metrics of a server; ``hostname`` is by default the machine's name."""

    def __init__(self, hostname: str | None = None, config: MetricsConfig | None = None) -> None:
        self.hostname = hostname or socket.gethostname()
        self.config = config or load_metrics_config()
        self.registry = Registry()
        #: The series that were updated since the log was written.
        self.changed: list[Series] = []
        self._declared = {
            name: self.registry.add(declared) for name, declared in self.config.ts.items()
        }
        self.handler_metrics = HandlerMetrics(self.registry, self.hostname, self.config)
        self._log: UpdateLog | None = None
        self._by_class = {digit: self.series(f"Requests{digit}XX", HOST) for digit in (2, 4, 5)}
        for series in self._by_class.values():
            series.show()  # Prometheus does not count the increase to a first value
        self.queue_time = self.series("QueueTime", HOST)
        self.worker_thread_time = self.series("WorkerThreadTime", HOST)
        self._system: dict[tuple[str, ...], Series] = {}
        #: TorchServe has not these, by name.
        self.added = {declared.name: self.registry.add(declared) for declared in _ADDED}
        self.limits_reached = self.added["marserve_limits_reached_total"]
        replacements = self.added["marserve_fork_server_replacements_total"]
        self.fork_server_replacements = replacements.join(self.hostname)

    def count_response(self, status: int) -> None:
        """Count an HTTP response; as 5XX unless it is 2xx or 4xx, as in TorchServe.

        Call it before the response is sent: then the metrics log contains it, and all that was
        counted before, when the client has it.
        """
        (self._by_class.get(status // 100) or self._by_class[5]).update(1)
        self.write_log()

    def series(self, name: str, *values: str) -> Series:
        """Join a series of a metric that metrics.yaml may leave out; ``values`` lack the host."""
        family = self._declared.get(name) or Family(Declared("gauge", name, "", ()))
        return family.join(*values, self.hostname)

    def attach(self, log: UpdateLog, *, legacy: bool = False) -> None:
        """Log the updates of all series that were not updated before.

        A ``legacy`` log has no request counters.
        """
        self._log = self.handler_metrics.log = log
        for name in _COUNTED if legacy else (*_COUNTED, *REQUEST_COUNTERS):
            if name in self._declared:
                self._declared[name].changed = self.changed

    def write_log(self) -> None:
        """Write what was counted to the log, if there is one."""
        if self._log is not None:
            self._log.write()

    def report_system(self, name: str, value: float | None, *values: str) -> None:
        """Update a metric of the host, if metrics.yaml declares it; ``values`` lack the host.

        A series whose value is unknown (None) is removed, since its last value is out of date.
        ValueError: their number is wrong, a counter would decrease, or there are too many series.
        """
        if name not in self._declared:
            return
        if value is None:
            if unknown := self._system.pop((name, *values), None):
                unknown.leave()
            return
        series = self._system.get((name, *values)) or self._join_system(name, values)
        series.update(value)
        if self._log is not None:
            self._log.report(series, value, None)

    def _join_system(self, name: str, values: tuple[str, ...]) -> Series:
        family = self._declared[name]
        dimensions = family.declared.dimensions
        if len(dimensions) != len(values) + 1:
            raise ValueError(f"the dimensions of {name} are {', '.join(dimensions)}")
        if len(self._system) >= _MAX_SYSTEM_SERIES:
            raise ValueError(f"there are {_MAX_SYSTEM_SERIES} series already")
        return self._system.setdefault((name, *values), family.join(*values, self.hostname))


class CatalogMetrics:
    """Counters and gauges of the catalog of the models, where there is one."""

    def __init__(self, metrics: Metrics) -> None:
        self._host = (metrics.hostname,)
        self._registry = metrics.registry
        series = [
            metrics.registry.add(counter(name, text, _HOSTNAME)).join(*self._host)
            for name, text in _OF_CATALOG.items()
        ]
        for each in series:
            each.show()
        self.read_failures, self.failures = series
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
        gauge = WatchedGauge(name, text, _HOSTNAME, lambda: [(self._host, value())])
        self._registry.watch(gauge)


class WorkflowMetrics:
    """The metrics of a workflow and its nodes, on the page until it is closed."""

    def __init__(self, metrics: Metrics, name: str, nodes: Iterable[str]) -> None:
        self._joined: list[Series] = []

        def join(metric: str, *values: str) -> Series:
            family = metrics.added[f"marserve_workflow_{metric}"]
            series = family.join(name, *values, metrics.hostname)
            series.show()
            self._joined.append(series)
            return series

        self.runs = {outcome: join("runs_total", outcome) for outcome in _OUTCOMES}
        self.seconds = join("run_seconds")  # of runs that were answered
        self.node_seconds = {node: join("node_seconds", node) for node in nodes}
        self.failed_tries = {node: join("failed_tries_total", node) for node in nodes}

    def close(self) -> None:
        """Remove them from the page."""
        for series in self._joined:
            series.leave()
