"""What the server counts, under TorchServe's names.

Which of TorchServe's metrics there are, of which type and with which labels, is for metrics.yaml to
say (`metrics_config`); code here knows their names and the order of the labels' values. One that
the file leaves out is updated all the same, in a series that is not on the page. Names that begin
with ``marserve_`` are additions. The page is served in every ``metrics_mode``: an empty one by
default was the complaint heard most.
"""

import socket

from marserve.frontend.telemetry.handler_metrics import HandlerMetrics, UpdateLog
from marserve.frontend.telemetry.metrics_config import (
    BUCKETS,
    Declared,
    MetricsConfig,
    load_metrics_config,
)
from marserve.frontend.telemetry.series import Family, Registry, Series

#: They came after the mode ``legacy``: there they are on the page, and all others of TorchServe's
#: in the log.
REQUEST_COUNTERS = (
    "ts_inference_requests_total",
    "ts_inference_latency_microseconds",
    "ts_queue_latency_microseconds",
)
#: Of the label Level.
HOST = "Host"
MILLISECONDS = 1_000
# Updated with requests, not on a timer: the log has their updates added up.
_COUNTED = (
    *("Requests2XX", "Requests4XX", "Requests5XX"),
    *("QueueTime", "WorkerThreadTime", "WorkerLoadTime"),
)
_MODEL = ("model_name", "model_version", "hostname")
_MAX_SYSTEM_SERIES = 1_000
# From a tenth of a millisecond, the least that batching costs, to where nobody waits any more.
_WAITS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)


# The size of batches is BentoML's monitoring, by its buckets; the rest tells where time went before
# a worker had the batch, and what became of batches that failed.
_HISTOGRAMS = {
    "marserve_batch_size": (
        "Requests that travelled together to a worker",
        tuple(1 << power for power in range(11)),
    ),
    "marserve_batch_seconds": ("Seconds from the closing of a batch to its answer", BUCKETS),
    "marserve_queue_seconds": ("Seconds that the oldest request of a batch had waited", _WAITS),
    "marserve_batch_window_seconds": (
        "Seconds that batches were held although a worker was idle; those that were",
        _WAITS,
    ),
}
_COUNTERS = {
    "marserve_failed_batches_total": "Batches that got an error as a whole",
    "marserve_isolated_batches_total": (
        "Failed batches that were taken apart to find the request that is to blame"
    ),
    "marserve_suspected_requests_total": (
        "Requests run alone because the same content had failed alone"
    ),
    "marserve_retried_requests_total": "Requests run once more because their worker died",
    "marserve_worker_failures_total": "Workers that ended unasked or could not load",
}
_ADDED = [
    *(
        Declared("histogram", name, "", _MODEL, buckets, text)
        for name, (text, buckets) in _HISTOGRAMS.items()
    ),
    *(Declared("counter", name, "", _MODEL, text=text) for name, text in _COUNTERS.items()),
]
_FORK_SERVER_REPLACEMENTS = Declared(
    "counter",
    "marserve_fork_server_replacements_total",
    "",
    ("hostname",),
    text="Fork servers that ended, or were killed because they did not answer",
)
_REJECTED = Declared(
    "counter",
    "marserve_rejected_requests_total",
    "",
    (*_MODEL, "reason"),
    text="Requests answered without having reached a worker",
)

# Of stateful models only.
_SEQUENCES_ENDED = Declared(
    "counter",
    "marserve_sequences_ended_total",
    "",
    (*_MODEL, "reason"),
    text="Sequences that are over, and why",
)
_SEQUENCE_ENDS_FAILED = Declared(
    "counter",
    "marserve_failed_sequence_ends_total",
    "",
    _MODEL,
    text="Ends of sequences over which the handler's end_sequence failed",
)
# Of handlers that have one.
_INPUT_LENGTHS_FAILED = Declared(
    "counter",
    "marserve_failed_input_lengths_total",
    "",
    _MODEL,
    text="Inputs whose length the handler's input_length could not tell",
)
_LIMITS_REACHED = Declared(
    "counter",
    "marserve_limits_reached_total",
    "",
    ("listener", "limit", "hostname"),
    text="Connections and requests that ran into a limit of their listener",
)


class Metrics:
    """Everything the server counts; ``hostname`` is by default the machine's name."""

    def __init__(self, hostname: str | None = None, config: MetricsConfig | None = None) -> None:
        self.hostname = hostname or socket.gethostname()
        self.config = config or load_metrics_config()
        self.registry = Registry()
        #: The series that have news for the log.
        self.changed: list[Series] = []
        self._declared = {
            name: self.registry.add(declared) for name, declared in self.config.ts.items()
        }
        self.handler_metrics = HandlerMetrics(self.registry, self.hostname, self.config)
        self._log: UpdateLog | None = None
        self._by_class = {digit: self.series(f"Requests{digit}XX", HOST) for digit in (2, 4)}
        self._other_answers = self.series("Requests5XX", HOST)
        for series in (*self._by_class.values(), self._other_answers):
            series.show()  # a counter whose first value is 1 has no increase that Prometheus sees
        self.queue_time = self.series("QueueTime", HOST)
        self.worker_thread_time = self.series("WorkerThreadTime", HOST)
        self._system: dict[tuple[str, ...], Series] = {}
        #: Labelled with a model's version; `rejected`, `sequences_ended` with the reason besides.
        self.added = [self.registry.add(declared) for declared in _ADDED]
        self.rejected = self.registry.add(_REJECTED)
        self.sequences_ended = self.registry.add(_SEQUENCES_ENDED)
        self.failed_sequence_ends = self.registry.add(_SEQUENCE_ENDS_FAILED)
        self.failed_input_lengths = self.registry.add(_INPUT_LENGTHS_FAILED)
        #: Labelled with a listener and the name of the limit.
        self.limits_reached = self.registry.add(_LIMITS_REACHED)
        replacements = self.registry.add(_FORK_SERVER_REPLACEMENTS)
        self._fork_server_replacements = replacements.join(self.hostname)

    def count_response(self, status: int) -> None:
        """Count an HTTP response; what is neither 2xx nor 4xx counts as 5XX, as in TorchServe.

        To be called before it is sent: then it is in the metrics log when the client has it, with
        all that was counted before.
        """
        (self._by_class.get(status // 100) or self._other_answers).update(1)
        self.write_log()

    def count_fork_server_replacement(self) -> None:
        """Count a fork server that was lost."""
        self._fork_server_replacements.update(1)

    def series(self, name: str, *values: str) -> Series:
        """The series of a server's metric, which is not on the page if metrics.yaml leaves it out.

        The values are those of its dimensions but for the last, the host; see `Family.join`.
        """
        family = self._declared.get(name) or Family(Declared("gauge", name, "", ()))
        return family.join(*values, self.hostname)

    def attach(self, log: UpdateLog, *, legacy: bool = False) -> None:
        """Log the updates of all series that were not updated before.

        What is reported goes to ``log``; what is counted it finds in `changed`. The request
        counters are not in a ``legacy`` log.
        """
        self._log = self.handler_metrics.log = log
        for name in _COUNTED if legacy else (*_COUNTED, *REQUEST_COUNTERS):
            if name in self._declared:
                self._declared[name].changed = self.changed

    def write_log(self) -> None:
        """Write what was counted by now to the log, if there is one."""
        if self._log is not None:
            self._log.write()

    def report_system(self, name: str, value: float, *values: str) -> None:
        """Update a metric of the host, if metrics.yaml declares it; ``values`` lack the host.

        Raises:
            ValueError: There are too many or too few values, or a counter would go down, or there
                are too many series.
        """
        if name not in self._declared:
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
            raise ValueError(f"there are {_MAX_SYSTEM_SERIES} series by now")
        return self._system.setdefault((name, *values), family.join(*values, self.hostname))
