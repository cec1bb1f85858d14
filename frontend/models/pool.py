"""The workers of one model version: more of them, fewer of them, how they are.

What all pools share (the launcher, the GPUs, the numbering of workers, the server's configuration)
comes as one `WorkerHost`.
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from marserve.backend.protocol import Load
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.config import Config
from marserve.frontend.models.settings import ModelSettings
from marserve.frontend.telemetry.metrics import ModelMetrics
from marserve.frontend.version import __version__
from marserve.frontend.workers.devices import DeviceAllocator
from marserve.frontend.workers.process import Launcher, WorkerSpec
from marserve.frontend.workers.supervisor import WorkerSupervisor, WorkerTimeouts


class WorkerHost:
    """What the workers of all models share.

    Args:
        config: The server's.
        launcher: Starts their processes.
        devices: Deals out GPUs.
    """

    def __init__(self, config: Config, launcher: Launcher, devices: DeviceAllocator) -> None:
        self.config = config
        self.launcher = launcher
        self.devices = devices
        self.cores = len(os.sched_getaffinity(0))
        self._ids = itertools.count(config.initial_worker_port)

    def next_worker_id(self) -> int:
        """A number no worker had before, TorchServe's "port"."""
        return next(self._ids)

    def environment(self, python_path: Sequence[str]) -> dict[str, str]:
        """The environment of a worker: the server's, less what is withheld.

        Args:
            python_path: Added to PYTHONPATH, for the programs that a handler starts.
        """
        withheld = self.config.blacklist_env_vars
        environment = dict(os.environ)
        environment["TS_DECODE_INPUT_REQUEST"] = str(self.config.decode_input_request).lower()
        inherited = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        environment["PYTHONPATH"] = os.pathsep.join([*inherited, *python_path])
        return {
            name: value
            for name, value in environment.items()
            if withheld is None or not withheld.fullmatch(name)
        }

    def threads(self, workers: int) -> int:
        """Intra-op threads for each of ``workers``; 0 where OMP_NUM_THREADS has decided."""
        if "OMP_NUM_THREADS" in os.environ:
            return 0
        return max(1, self.cores // max(1, workers))


@dataclass(frozen=True)
class ServedModel:
    """What a worker has to know of its model."""

    name: str
    version: str
    directory: Path
    handler: str
    settings: ModelSettings


class WorkerPool:
    """The workers of one model version, in the order they were started.

    Args:
        model: What they serve.
        host: What they share with those of other models.
        batcher: Where their batches come from.
        metrics: What is counted for the model.
        on_last_gone: Called when no worker is left that could ever serve.
    """

    def __init__(
        self,
        model: ServedModel,
        host: WorkerHost,
        batcher: Batcher,
        metrics: ModelMetrics,
        on_last_gone: Callable[[], None],
    ) -> None:
        self._model = model
        self._host = host
        self._batcher = batcher
        self._metrics = metrics
        self._on_last_gone = on_last_gone
        self._workers: list[WorkerSupervisor] = []
        self._retiring: set[WorkerSupervisor] = set()
        self.min_workers = 0
        self.max_workers = 0
        #: Workers that serve or may come to serve: neither given up nor taken out.
        self.alive = 0

    def __iter__(self) -> Iterator[WorkerSupervisor]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def ready(self) -> int:
        """Workers that can take a batch now."""
        return sum(worker.is_ready for worker in self._workers)

    @property
    def is_working(self) -> bool:
        """Whether anybody could still answer what has been accepted."""
        return any(worker.is_ready for worker in (*self._workers, *self._retiring))

    @property
    def is_healthy(self) -> bool:
        """TorchServe's ping: as many healthy workers as the minimum."""
        return sum(worker.is_healthy for worker in self._workers) >= self.min_workers

    def resize(
        self, min_workers: int, max_workers: int
    ) -> tuple[list[WorkerSupervisor], list[WorkerSupervisor]]:
        """Start what is missing to the minimum, take out what is over the maximum.

        Those taken out are still running: `retire` ends them. Those given up are forgotten first.

        Returns:
            The workers started and those taken out, the youngest first.
        """
        self.min_workers, self.max_workers = min_workers, max_workers
        self._workers = [worker for worker in self._workers if not worker.is_stopped]
        started = [self._add() for _ in range(min_workers - len(self._workers))]
        retired = [self._workers.pop() for _ in range(len(self._workers) - max_workers)]
        self._retiring.update(retired)
        self._lose(len(retired))
        return started, retired

    async def retire(self, workers: list[WorkerSupervisor], drain: float) -> None:
        """End workers; each may finish its batch for ``drain`` seconds."""
        await asyncio.gather(*(worker.stop(drain) for worker in workers))

    async def close(self, drain: float) -> None:
        """End all workers, also those that somebody has begun to retire."""
        self.resize(0, 0)
        await self.retire(list(self._retiring), drain)

    def _add(self) -> WorkerSupervisor:
        worker = self._make()
        self._workers.append(worker)
        self.alive += 1
        worker.start(on_end=partial(self._ended, worker))
        return worker

    def _ended(self, worker: WorkerSupervisor) -> None:
        self._host.devices.release(worker.gpu_id)
        if worker in self._retiring:
            self._retiring.discard(worker)
        else:
            self._lose(1)

    def _lose(self, count: int) -> None:
        self.alive -= count
        if count and not self.alive:
            self._on_last_gone()

    def _make(self) -> WorkerSupervisor:
        model, host = self._model, self._host
        settings, config = model.settings, host.config
        worker_id = host.next_worker_id()
        python_path = _python_path(model.directory, model.handler)
        gpu = host.devices.acquire(settings.device_ids) if settings.use_gpu else None
        return WorkerSupervisor(
            worker_id=worker_id,
            spec=WorkerSpec(
                name=f"W-{worker_id}-{model.name}_{model.version}",
                environment=host.environment(python_path),
                python_path=python_path,
                model_dir=str(model.directory),
                threads=host.threads(self.min_workers),
            ),
            load=Load(
                model_name=model.name,
                model_dir=str(model.directory),
                handler=model.handler,
                batch_size=settings.batch_size,
                gpu_id=gpu,
                limit_max_image_pixels=config.limit_max_image_pixels,
                decode_input_request=config.decode_input_request,
                max_response_bytes=config.max_response_size,
                server_version=__version__,
            ),
            timeouts=WorkerTimeouts(
                startup=settings.startup_timeout,
                response=settings.response_timeout,
                retry_window=settings.max_retry_timeout,
            ),
            batcher=self._batcher,
            launcher=host.launcher,
            metrics=self._metrics,
        )


def _python_path(directory: Path, handler: str) -> tuple[str, ...]:
    """What user code may import from: the model directory, and the folder of a ``path/file``."""
    folder = handler.partition(":")[0].rpartition("/")[0]
    paths = [directory.resolve()]
    if folder:
        paths.insert(0, (directory / folder).resolve())
    return tuple(map(str, paths))
