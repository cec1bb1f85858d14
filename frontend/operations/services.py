"""What the endpoints of all transports share."""

from dataclasses import dataclass, field

from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.memory import bytes_in_flight
from marserve.frontend.operations.dashboard import Dashboard
from marserve.frontend.operations.management import ModelManagement
from marserve.frontend.operations.open_inference_models import OpenInferenceModels
from marserve.frontend.operations.requests import RequestLines
from marserve.frontend.operations.workflows import WorkflowManagement
from marserve.frontend.security.given_tokens import Tokens
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.access_log import AccessLog
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.trace_context import NO_SAMPLING, Sampling


@dataclass(frozen=True)
class Services:
    """What requests of any transport use, and what checks, counts and limits them."""

    config: Config
    registry: ModelRegistry
    management: ModelManagement
    workflows: WorkflowManagement
    metrics: Metrics
    access_log: AccessLog
    tokens: Tokens | None  # None: no keys
    requests: RequestLines
    dashboard: Dashboard
    sampling: Sampling = NO_SAMPLING
    #: Of all listeners with inference, so that they use one slice of a turn of the event loop.
    long_work: LongWork = field(default_factory=LongWork)

    def long_work_of(self, *, is_inference: bool) -> LongWork:
        """Return the long work of a listener.

        Listeners for operators have another than those for clients: pages of metrics would take
        turns with each body that a client sends.
        """
        return self.long_work if is_inference else self.dashboard.long_work

    def repository(self) -> OpenInferenceModels:
        """Return the models, with what loads and unloads them."""
        workers = max(1, self.config.default_workers_per_model)
        return OpenInferenceModels(self.registry, self.management, workers)

    def count_limit(self, listener: str, limit: str) -> None:
        """Count that clients of a listener have reached a limit."""
        counters = self.metrics.limits_reached
        counters.join(listener, limit, self.metrics.hostname).update(1)

    def byte_limits(self) -> tuple[int, int]:
        """Return the bytes in flight of all clients of a listener, and of one client.

        A single request of the maximum size can always be served.
        """
        config = self.config
        of_all = bytes_in_flight(config.max_bytes_in_flight)
        of_one = config.max_client_bytes_in_flight or of_all // 2
        return max(of_all, config.max_request_size), max(of_one, config.max_request_size)
