"""Metrics that are not about single requests: gauges of the models, the host, the metrics log."""

from collections.abc import Callable, Iterable, Sequence

from marserve.frontend.aio.background import BackgroundTasks
from marserve.frontend.batching.sequences.sequence_table import SequenceTable
from marserve.frontend.configuration.config import Config
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.stateful.stateful_version import StatefulModelVersion
from marserve.frontend.telemetry.gpu import GpuReader
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_log import MetricsLog
from marserve.frontend.telemetry.series import WatchedGauge
from marserve.frontend.telemetry.system import SystemProbe

_LABELS = ("model_name", "model_version", "hostname")


def start_monitoring(
    background: BackgroundTasks,
    config: Config,
    metrics: Metrics,
    registry: ModelRegistry,
    gpus: GpuReader,
) -> None:
    """Add the gauges, and start the background tasks that are configured."""
    watch_models(metrics, registry)
    if config.metrics_mode != "prometheus":
        log = MetricsLog(
            metrics,
            legacy=config.metrics_mode == "legacy",
            as_json=config.log_format == "json",
            delayed=config.async_logging,
        )
        background.keep_running("The metrics log", log.run)
    if not config.disable_system_metrics:

        def pids() -> Iterable[int]:
            pids = (worker.pid for model in registry for worker in model.workers)
            return [pid for pid in pids if pid is not None]

        probe = SystemProbe(
            metrics,
            config.metric_time_interval,
            gpus,
            gpu_count=config.number_of_gpu,
            command=config.system_metrics_cmd,
            pids=pids,
        )
        background.keep_running("The measurement of the host", probe.run)


def watch_models(metrics: Metrics, registry: ModelRegistry) -> None:
    """Add the gauges of the models."""

    def watch(name: str, help_: str, value: Callable[[ModelVersion], float]) -> None:
        def samples() -> Iterable[tuple[Sequence[str], float]]:
            return [
                ((model.name, model.version, metrics.hostname), value(model)) for model in registry
            ]

        metrics.registry.watch(WatchedGauge(name, help_, _LABELS, samples))

    def remembered(model: ModelVersion) -> float:
        return model.batcher.isolation.remembered

    def failing(model: ModelVersion) -> float:
        return model.batcher.isolation.share

    def failed() -> Iterable[tuple[Sequence[str], float]]:
        models = {(load.name, load.version) for load in registry.failed.listed()}
        return [((*model, metrics.hostname), 1) for model in models]

    watch("marserve_queued_requests", "Requests that wait for a worker", lambda m: m.queued)
    watch("marserve_ready_workers", "Workers that can take a batch", lambda m: m.workers.ready)
    watch("marserve_open_requests", "Requests not answered yet", lambda m: m.pending)
    watch("marserve_max_batch_size", "The largest batch now", lambda m: m.batcher.size)
    watch("marserve_failed_request_share", "Share of requests that fail by themselves", failing)
    watch("marserve_remembered_failures", "Contents that failed alone and run alone", remembered)
    _watch_sequences(metrics, registry)
    failures = "Models the start could not load"
    metrics.registry.watch(WatchedGauge("marserve_failed_loads", failures, _LABELS, failed))


def _watch_sequences(metrics: Metrics, registry: ModelRegistry) -> None:
    def watch(name: str, help_: str, value: Callable[[SequenceTable], float]) -> None:
        def samples() -> Iterable[tuple[Sequence[str], float]]:
            return [
                ((model.name, model.version, metrics.hostname), value(model.sequences))
                for model in registry
                if isinstance(model, StatefulModelVersion)
            ]

        metrics.registry.watch(WatchedGauge(name, help_, _LABELS, samples))

    watch("marserve_sequences_open", "Sequences that a worker has", lambda table: table.open)
    watch(
        "marserve_sequences_waiting", "Sequences that wait for a slot", lambda table: table.waiting
    )
