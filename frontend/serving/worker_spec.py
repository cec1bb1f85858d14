"""What a worker starts with: its process, the message that loads its model, and its trials."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marserve.backend.manifest import Manifest
from marserve.backend.processes.bootstrap import Runner
from marserve.backend.protocol import STREAM_WINDOW, Load, Trials
from marserve.frontend.archives.requirements import ModelEnvironment
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.setting_kinds import AUTOMATIC, REFUSE
from marserve.frontend.logs.setup import log_directories
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.torch_options import torch_options
from marserve.frontend.settings.batching_settings import sizes_to_try, sizes_to_validate
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.version import __version__
from marserve.frontend.workers.launchers.command import CPU_LAUNCHER
from marserve.frontend.workers.launchers.local_process import WorkerSpec

# The time for `validateBatching` where its value is the default, or the model serves.
_OPTIONAL_SECONDS = 2.0


@dataclass(frozen=True)
class ServedModel:
    """A model as its workers need it."""

    manifest: Manifest
    directory: Path
    settings: ModelSettings
    environment: ModelEnvironment = field(default_factory=ModelEnvironment)
    #: Brings back files that something has removed, before a worker starts (`Archive.restore`).
    restore: Callable[[], Awaitable[None]] | None = None

    @property
    def parallel_level(self) -> int:
        """Devices of each worker; 0 for a model that is not parallel."""
        return self.settings.parallel.level if self.settings.parallel else 0


def worker_spec(
    model: ServedModel,
    host: WorkerHost,
    worker_id: int,
    gpus: Sequence[int],
    *,
    position: int,
    count: int,
) -> WorkerSpec:
    """Return the specification of the worker at ``position`` (from 0) of ``count``.

    Of a parallel model, it sees only its ``gpus``.
    """
    parallel, environment = model.settings.parallel, model.environment
    debugged = model.settings.debugged
    runner = None if debugged else _runner(model, host, worker_id, position, count)
    python_path = (*_python_path(model.directory, model.manifest.handler), *environment.packages)
    python = environment.python or host.python
    if runner or environment.packages:
        python = python or sys.executable
    torch, worker_environment = torch_options(
        model.settings,
        host.environment(python_path, parallel.environment(gpus) if parallel else None),
        cores=host.cores,
        workers=count,
        runner=runner,
    )
    return WorkerSpec(
        name=f"W-{worker_id}-{model.manifest.model_name}_{model.manifest.model_version}",
        environment=worker_environment,
        python_path=python_path,
        model_dir=str(model.directory),
        threads=torch.threads,
        torch=torch,
        python=python,
        runner=runner,
        terminal=debugged,
    )


def load_message(
    model: ServedModel, config: Config, gpu: int | None, declared_metrics: list[list[Any]]
) -> Load:
    """Return the message that makes a worker load its model.

    ``gpu`` is the ordinal among the GPUs that it sees, None on the CPU.
    """
    settings = model.settings
    return Load(
        model_name=model.manifest.model_name,
        model_dir=str(model.directory),
        handler=model.manifest.handler,
        batch_size=settings.batching.max_size,
        gpu_id=gpu,
        limit_max_image_pixels=config.limit_max_image_pixels,
        max_response_bytes=config.max_response_size,
        server_version=__version__,
        envelope=model.manifest.envelope,
        asynchronous=settings.asynchronous,
        samples=list(settings.sample_inputs),
        compiled_sizes=list(settings.batching.compiled_sizes),
        overlap_stages=settings.overlap_stages,
        declared_metrics=declared_metrics,
        max_call_bytes=config.max_request_size,
        stream_window=min(STREAM_WINDOW, (config.max_stream_backlog or 2 * STREAM_WINDOW) // 2),
        batch_dims=list(settings.batching.batch_dims),
        stack_inputs=settings.stack_inputs,
        json_nan=config.json_nan,
        trials=trials_at_load(settings),
    )


def _runner(
    model: ServedModel, host: WorkerHost, worker_id: int, position: int, count: int
) -> Runner | None:
    parallel = model.settings.parallel
    if parallel and parallel.has_ranks:
        return parallel.runner(f"{model.manifest.model_name}_{worker_id}", log_directories()[0])
    if not host.cpu_launcher:
        return None
    arguments = (host.config.cpu_launcher_args or "").split()
    if count > 1:
        arguments += ["--ninstances", str(count), "--rank", str(position)]
    return Runner(CPU_LAUNCHER, tuple(arguments))


def _python_path(directory: Path, handler: str) -> tuple[str, ...]:
    """Return the directories from which user code may import.

    They are the folder of a handler ``path/file``, the model directory and, if that is a link, the
    directory of the link, so that the model can be imported as a package.
    """
    folder = handler.partition(":")[0].rpartition("/")[0]
    paths = [directory.resolve()]
    if directory.is_symlink():
        paths.append(directory.parent)
    if folder:
        paths.insert(0, (directory / folder).resolve())
    return tuple(map(str, paths))


def trials_at_load(settings: ModelSettings) -> Trials:
    """Return the trials between loading and serving, except for `threads_to_try`.

    A stateful model runs no samples for its costs: they would belong to no sequence.
    """
    batching, is_optional = settings.batching, settings.validation == AUTOMATIC
    if is_optional:
        is_compared = batching.is_automatic and not settings.stateful
    else:
        is_compared = bool(settings.validation)
    seconds = min(_OPTIONAL_SECONDS, settings.startup_timeout / 4)
    return Trials(
        seconds=seconds,
        sizes=[] if settings.stateful else sizes_to_try(settings.batching),
        validated_sizes=sizes_to_validate(batching) if is_compared else [],
        validation_seconds=seconds if is_optional else settings.startup_timeout / 2,
        tolerance=settings.validation_tolerance or 0.0,
        must_validate=settings.validation == REFUSE,
        only_differences=is_optional,
    )


def trials_while_serving(settings: ModelSettings) -> Trials:
    """Return the comparison of batches of a model that serves, if its settings have changed."""
    batching, is_wanted = settings.batching, settings.validation in (AUTOMATIC, REFUSE)
    is_compared = is_wanted and batching.is_automatic and _runs_samples(settings)
    return Trials(
        validated_sizes=sizes_to_validate(batching) if is_compared else [],
        validation_seconds=_OPTIONAL_SECONDS,
        tolerance=settings.validation_tolerance or 0.0,
        only_differences=True,
    )


def sizes_while_idle(settings: ModelSettings) -> Sequence[int]:
    """Return the batch sizes that are measured while the model is idle, if not known."""
    return sizes_to_try(settings.batching) if _runs_samples(settings) else []


def _runs_samples(settings: ModelSettings) -> bool:
    """Whether a worker can run samples between requests.

    Not one of several processes, with coroutines, or under a debugger.
    """
    return not (
        settings.stateful or settings.asynchronous or settings.debugged or settings.has_ranks
    )
