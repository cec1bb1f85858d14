"""What is counted of batches, for all models: additions to TorchServe's metrics.

The size of batches is BentoML's monitoring, by its buckets; the rest tells where time went before a
worker had the batch, and what became of batches that failed.
"""

from prometheus_client import Histogram
from prometheus_client.metrics import MetricWrapperBase

from marserve.frontend.telemetry.exposition import Registry

_MODEL = ("model_name", "model_version", "hostname")
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# From a tenth of a millisecond, the least that batching costs, to where nobody waits any more.
_WAITS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)


class BatchMetrics:
    """Metrics labelled with a model's name and version and the host.

    Args:
        registry: Where they are shown.
    """

    def __init__(self, registry: Registry) -> None:
        self.size = Histogram(
            "marserve_batch_size",
            "Requests that travelled together to a worker",
            _MODEL,
            buckets=_SIZES,
            registry=registry,
        )
        self.seconds = Histogram(
            "marserve_batch_seconds",
            "Seconds from the closing of a batch to its answer",
            _MODEL,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "marserve_queue_seconds",
            "Seconds that the oldest request of a batch had waited",
            _MODEL,
            buckets=_WAITS,
            registry=registry,
        )
        self.window_seconds = Histogram(
            "marserve_batch_window_seconds",
            "Seconds that batches were held although a worker was idle; those that were",
            _MODEL,
            buckets=_WAITS,
            registry=registry,
        )
        self.failed = registry.counter(
            "marserve_failed_batches_total", "Batches that got an error as a whole", _MODEL
        )
        self.isolated = registry.counter(
            "marserve_isolated_batches_total",
            "Failed batches that were taken apart to find the request that is to blame",
            _MODEL,
        )
        self.retried = registry.counter(
            "marserve_retried_requests_total",
            "Requests run once more because their worker died",
            _MODEL,
        )

    def all(self) -> tuple[MetricWrapperBase, ...]:
        """Every one of them."""
        return (
            self.size,
            self.seconds,
            self.queue_seconds,
            self.window_seconds,
            self.failed,
            self.isolated,
            self.retried,
        )
