"""Metrics that are not about single requests: gauges of the models, the host, the metrics log."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from marserve.frontend.aio.background import BackgroundTasks
from marserve.frontend.configuration.config import Config
from marserve.frontend.logs.writers import dropped_lines
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.stateful.stateful_version import StatefulModelVersion
from marserve.frontend.telemetry.gpu import GpuReader
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_log import MetricsLog
from marserve.frontend.telemetry.series import WatchedGauge
from marserve.frontend.telemetry.system import SystemProbe

_M = TypeVar("_M", bound=ModelVersion)
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

    def watch(kind: type[_M], name: str, help_: str, value: Callable[[_M], float]) -> None:
        def samples() -> Iterable[tuple[Sequence[str], float]]:
            models = [model for model in registry if isinstance(model, kind)]
            return [((m.name, m.version, metrics.hostname), value(m)) for m in models]

        metrics.registry.watch(WatchedGauge(name, help_, _LABELS, samples))

    def failed() -> Iterable[tuple[Sequence[str], float]]:
        models = {(load.name, load.version) for load in registry.failed.listed()}
        return [((*model, metrics.hostname), 1) for model in models]

    each = ModelVersion
    metrics.registry.watch(
        WatchedGauge(
            "marserve_dropped_log_lines",
            "Log lines that were left out, because their target did not take them in time",
            ("target", "hostname"),
            lambda: [
                ((target, metrics.hostname), lines) for target, lines in dropped_lines().items()
            ],
        )
    )
    watch(each, "marserve_queued_requests", "Requests that wait for a worker", lambda m: m.queued)
    watch(
        each, "marserve_ready_workers", "Workers that can take a batch", lambda m: m.workers.ready
    )
    watch(
        each,
        "marserve_given_up_workers",
        "Workers that failed and are not started again",
        lambda m: len(m.workers) - m.workers.alive,
    )
    watch(each, "marserve_free_capacity", "Requests that are accepted now", lambda m: m.accepts)
    watch(each, "marserve_open_requests", "Requests not answered yet", lambda m: m.pending)
    watch(each, "marserve_max_batch_size", "The largest batch now", lambda m: m.batcher.size)
    watch(
        each,
        "marserve_failed_request_share",
        "Share of requests that fail by themselves",
        lambda m: m.batcher.isolation.rate.share,
    )
    watch(
        each,
        "marserve_remembered_failures",
        "Contents that failed alone and run alone",
        lambda m: len(m.batcher.isolation.contents),
    )
    watch(
        StatefulModelVersion,
        "marserve_sequences_open",
        "Sequences that a worker has",
        lambda m: m.sequences.open,
    )
    watch(
        StatefulModelVersion,
        "marserve_sequences_waiting",
        "Sequences that wait for a slot",
        lambda m: m.sequences.waiting,
    )
    failures = "Models the start could not load"
    metrics.registry.watch(WatchedGauge("marserve_failed_loads", failures, _LABELS, failed))
