"""The workers of one model version, and changes of their number.

The blocks of GPUs limit the number of workers of a parallel model. With torch's launcher for CPUs
all workers are replaced when their number changes, because each is bound to its share of the cores;
the new ones start while the old ones finish their batches.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from marserve.backend.protocol import Load
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.errors import NotEnoughDevices
from marserve.frontend.serving.dispatch_choice import DispatchKinds, choose_dispatch
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.torch_options import threads_to_try
from marserve.frontend.serving.worker_spec import (
    ServedModel,
    load_message,
    sizes_while_idle,
    trials_while_serving,
    worker_spec,
)
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.tracing.worker_history import WorkerHistory
from marserve.frontend.workers.batch_validation import BatchValidation
from marserve.frontend.workers.dispatch.asynchronous import Async
from marserve.frontend.workers.dispatch.batched import Batched, DispatchStrategy
from marserve.frontend.workers.dispatch.continuous_batching import ContinuousBatching
from marserve.frontend.workers.dispatch.outstanding import OutstandingBatches
from marserve.frontend.workers.failures import Failure
from marserve.frontend.workers.idle_profiling import IdleProfiling
from marserve.frontend.workers.launchers.openmp import TorchOptions
from marserve.frontend.workers.supervisor import WorkerSupervisor
from marserve.frontend.workers.worker_threads import ThreadChoice, WorkerThreads


@dataclass(eq=False)
class WorkerOrder:
    """A request for ``low`` to ``high`` workers, valid until the next one."""

    low: int
    high: int
    superseded: asyncio.Event = field(default_factory=asyncio.Event)


class Resized(NamedTuple):
    """Workers that were started, and those removed (youngest first), which the caller retires."""

    started: list[WorkerSupervisor]
    retired: list[WorkerSupervisor]


class WorkerPool:
    """The workers of one model version, in the order in which they were started.

    ``on_closed`` is called when the last worker that may serve has ended or cannot load.
    """

    def __init__(
        self,
        model: ServedModel,
        host: WorkerHost,
        batcher: Batcher,
        metrics: ModelMetrics,
        on_closed: Callable[[], None],
    ) -> None:
        self._model = model
        self._host = host
        self._batcher = batcher
        self._metrics = metrics
        self._on_closed = on_closed
        self._workers: list[WorkerSupervisor] = []
        self._retiring: set[WorkerSupervisor] = set()
        #: The GPUs of each worker that has not ended, retiring ones included.
        self._gpus: dict[WorkerSupervisor, tuple[int, ...]] = {}
        name = f"{model.manifest.model_name}_{model.manifest.model_version}"
        self.idle_profiling = IdleProfiling(name, batcher)
        self.validation = BatchValidation(name, batcher, lambda: self._dispatches)
        self.history = WorkerHistory()
        self.order = WorkerOrder(0, 0)
        self.min_workers = 0
        self.max_workers = 0
        #: Whether requests are accepted: not if no worker can load the model.
        self.is_open = False

    def __iter__(self) -> Iterator[WorkerSupervisor]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def alive(self) -> int:
        """Number of workers that serve or may serve later: neither given up nor removed."""
        return sum(not worker.is_stopped for worker in self._workers)

    @property
    def ready(self) -> int:
        """Number of workers that can accept a batch now."""
        return sum(worker.is_ready for worker in self._workers)

    @property
    def busy(self) -> int:
        """Number of workers that are processing requests."""
        return sum(worker.is_busy for worker in self._workers)

    @property
    def free_capacity(self) -> int:
        """Requests that the workers can still process without waiting for others."""
        return sum(dispatch.free_capacity for dispatch in self._dispatches)

    def to_saturate(self, size: int) -> int:
        """Return the requests in flight that keep all workers busy, with batches of this size."""
        return sum(dispatch.to_saturate(size) for dispatch in self._dispatches)

    @property
    def max_outstanding(self) -> int | None:
        """Batches, or single requests, that a worker holds at most; None if no worker is ready."""
        return max((dispatch.limit for dispatch in self._dispatches), default=None)

    @property
    def _dispatches(self) -> Iterator[DispatchStrategy]:
        return (worker.dispatch for worker in self._workers if worker.dispatch is not None)

    @property
    def is_working(self) -> bool:
        """Whether any worker can answer accepted requests."""
        return any(worker.can_answer for worker in (*self._workers, *self._retiring))

    @property
    def is_healthy(self) -> bool:
        """Whether the minimum of workers is healthy, as in TorchServe's ping."""
        return sum(worker.is_healthy for worker in self._workers) >= self.min_workers

    @property
    def last_failure(self) -> Failure | None:
        """The latest failure of workers that are not ready."""
        unready = (worker for worker in self._workers if not worker.is_ready)
        failures = [worker.last_failure for worker in unready if worker.last_failure]
        return max(failures, key=attrgetter("moment"), default=None)

    @property
    def batchers(self) -> list[Batcher]:
        """The batchers of the workers: one for all of them."""
        return [self._batcher]

    def reconfigure(self, settings: ModelSettings) -> None:
        """Use new settings for batches now, and for workers that start from now on."""
        self._model = replace(self._model, settings=settings)
        self.validation.begin(trials_while_serving(settings), settings.batching)
        for batcher in {self._batcher, *self.batchers}:
            batcher.reconfigure(settings.worker_batching)
        self.idle_profiling.begin(sizes_while_idle(settings), settings.batching)

    def begin_order(self, low: int, high: int) -> WorkerOrder:
        """Supersede the earlier order, unless the numbers are equal; `resize` carries it out.

        Raises:
            NotEnoughDevices: It cannot be carried out.
        """
        self._check_capacity(high)
        if (low, high) != (self.order.low, self.order.high):
            self.order.superseded.set()
            self.order = WorkerOrder(low, high)
        return self.order

    def resize(self, min_workers: int, max_workers: int) -> Resized:
        """Remove stopped workers, start up to the minimum, remove those above the maximum.

        Raises:
            NotEnoughDevices: There are too few GPUs for one worker of a parallel model.
        """
        capacity = self._check_capacity(max_workers)
        self.min_workers, self.max_workers = min(min_workers, capacity), min(max_workers, capacity)
        return self._bring_between(self.min_workers, self.max_workers)

    def set_current_count(self, count: int) -> Resized:
        """Set the current number of workers, within the minimum and maximum, which stay."""
        count = min(max(count, self.min_workers), self.max_workers)
        return self._bring_between(count, count)

    def remove(self, worker: WorkerSupervisor) -> list[WorkerSupervisor]:
        """Remove a worker, also below the minimum; return it if the caller must retire it."""
        if worker not in self._workers:
            return []
        self._workers.remove(worker)
        if worker.is_stopped:
            return []
        self._retiring.add(worker)
        self._update_is_open()
        return [worker]

    async def retire(self, workers: Iterable[WorkerSupervisor], drain: float) -> None:
        """Stop workers; each may finish its batch for ``drain`` seconds."""
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.stop(drain))

    async def close(self, drain: float) -> None:
        """Stop all workers, also those that are being retired."""
        self.idle_profiling.stop()
        self.validation.stop()
        self.resize(0, 0)
        await self.retire(list(self._retiring), drain)

    def _bring_between(self, low: int, high: int) -> Resized:
        self._workers = [worker for worker in self._workers if not worker.is_stopped]
        count = min(max(len(self._workers), low), high)
        is_bound_to_cores = self._host.cpu_launcher and not self._model.settings.has_ranks
        keep = 0 if is_bound_to_cores and count != len(self._workers) else count
        retired = self._by_retirement()[: max(0, len(self._workers) - keep)]
        self._workers = [worker for worker in self._workers if worker not in retired]
        started = [self._add(count) for _ in range(count - len(self._workers))]
        self._retiring.update(retired)
        self._share_out_cores()
        self._update_is_open()
        return Resized(started, retired)

    def _by_retirement(self) -> list[WorkerSupervisor]:
        """Return the workers in the order in which they are retired: the youngest first."""
        return self._workers[::-1]

    def _check_capacity(self, max_workers: int) -> int:
        """Return the number of workers that the devices allow; raises NotEnoughDevices for none."""
        settings, devices = self._model.settings, self._host.devices
        if settings.debugged:
            return 1
        if not settings.parallel or not settings.use_gpu or not devices.count:
            return sys.maxsize
        capacity = devices.capacity(settings.parallel.level, settings.device_ids)
        if not capacity and max_workers:
            raise NotEnoughDevices(self._model.manifest.model_name, self._model.parallel_level)
        return capacity

    def _add(self, count: int) -> WorkerSupervisor:
        worker = self._make(count)
        self._workers.append(worker)
        worker.start(partial(self._ended, worker), self._update_is_open)
        return worker

    def _ended(self, worker: WorkerSupervisor) -> None:
        self._host.devices.release(self._gpus.pop(worker))
        self._retiring.discard(worker)
        self._update_is_open()

    def _update_is_open(self) -> None:
        """Update `is_open` after a worker was added or removed, has loaded, or failed to load."""
        was_open = self.is_open
        self.is_open = any(not (each.is_stopped or each.cannot_load) for each in self._workers)
        if was_open and not self.is_open:
            self._on_closed()

    def _make(self, count: int) -> WorkerSupervisor:
        model, host = self._model, self._host
        settings, level = model.settings, model.parallel_level
        worker_id = host.next_worker_id(level)
        gpus = host.devices.acquire(level or 1, settings.device_ids) if settings.use_gpu else ()
        gpu = gpus[0] if gpus else None
        position = len(self._workers)
        spec = worker_spec(model, host, worker_id, gpus, position=position, count=count)
        # A parallel worker sees its own GPUs only, and counts them from 0.
        load = self._load_message(0 if level and gpus else gpu)
        tried = threads_to_try(spec.torch, settings, gpu)
        worker = WorkerSupervisor(
            worker_id=worker_id,
            spec=replace(spec, on_metric_line=self._metrics.printed),
            load=load,
            startup_timeout=settings.startup_timeout,
            retry_window=settings.max_retry_timeout,
            make_dispatch=choose_dispatch(
                model, host, self._dispatch_kinds(), lambda: self.alive > 0
            ),
            batcher=self._make_batcher(),
            validation=self.validation,
            launcher=host.launcher,
            metrics=self._metrics,
            threads=WorkerThreads(spec.torch, tried, self._threads_found(spec.torch)),
            history=self.history,
            restore=model.restore,
        )
        worker.gpu_id = gpu
        self._gpus[worker] = gpus
        return worker

    def _share_out_cores(self) -> None:
        """Set each worker's share of the cores after the number of workers has changed."""
        settings, count = self._model.settings, len(self._workers)
        for position, worker in enumerate(self._workers):
            gpus = self._gpus.get(worker, ())
            spec = worker_spec(
                self._model, self._host, worker.worker_id, gpus, position=position, count=count
            )
            worker.share_out(spec.torch, threads_to_try(spec.torch, settings, worker.gpu_id))

    def _threads_found(self, torch: TorchOptions) -> ThreadChoice | None:
        """Return the number of threads that a worker with the same share has measured as best."""
        shares = [worker.threads for worker in self._workers if worker.threads.options.is_share]
        found = (each.found for each in shares if each.options.threads == torch.threads)
        return next(filter(None, found), None)

    def _make_batcher(self) -> Batcher:
        return self._batcher

    def _load_message(self, gpu: int | None) -> Load:
        return load_message(self._model, self._host.config, gpu, self._metrics.declarations)

    def _dispatch_kinds(self) -> DispatchKinds:
        return DispatchKinds(Batched, OutstandingBatches, ContinuousBatching, Async)
