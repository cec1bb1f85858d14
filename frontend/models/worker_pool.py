"""The workers of one model version: more of them, fewer of them, how they are.

A parallel model has at most as many workers as there are blocks of GPUs for them. A model under
torch's launcher for CPUs has its workers started anew when their number changes: each is bound to
its share of the cores. The new ones start while the old ones finish their batches.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.isolation import RetryBudget
from marserve.frontend.errors import NotEnoughDevices
from marserve.frontend.models.host import ServedModel, WorkerHost, load_message, worker_spec
from marserve.frontend.models.settings.model_settings import ModelSettings
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.workers.dispatch.asynchronous import MAX_IN_FLIGHT, Async
from marserve.frontend.workers.dispatch.continuous_batching import ContinuousBatching
from marserve.frontend.workers.dispatch.outstanding import dispatch_batches
from marserve.frontend.workers.failures import Failure
from marserve.frontend.workers.supervisor import MakeDispatch, WorkerSupervisor, WorkerTimeouts


@dataclass(eq=False)
class WorkerOrder:
    """That a model is to have between ``low`` and ``high`` workers; in force until the next."""

    low: int
    high: int
    superseded: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_superseded(self) -> bool:
        """Whether another order is in force now."""
        return self.superseded.is_set()


class Resized(NamedTuple):
    """Workers started, and those taken out, the youngest first: they run until they are retired."""

    started: list[WorkerSupervisor]
    retired: list[WorkerSupervisor]


class WorkerPool:
    """The workers of one model version, in the order they were started.

    ``on_closed`` is called when no worker is left that could serve, as far as is known.
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
        self._retry_budget = RetryBudget()
        self._workers: list[WorkerSupervisor] = []
        self._retiring: set[WorkerSupervisor] = set()
        self._gpus: dict[WorkerSupervisor, tuple[int, ...]] = {}
        self.order = WorkerOrder(0, 0)
        self.min_workers = 0
        self.max_workers = 0
        #: Whether requests are taken for them: not where none of them can load the model.
        self.is_open = False

    def __iter__(self) -> Iterator[WorkerSupervisor]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def alive(self) -> int:
        """Workers that serve or may come to serve: neither given up nor taken out."""
        return sum(not worker.is_stopped for worker in self._workers)

    @property
    def ready(self) -> int:
        """Workers that can take a batch now."""
        return sum(worker.is_ready for worker in self._workers)

    @property
    def busy(self) -> int:
        """Workers that have requests in hand."""
        return sum(worker.is_busy for worker in self._workers)

    @property
    def is_working(self) -> bool:
        """Whether anybody could still answer what has been accepted."""
        return any(worker.is_ready for worker in (*self._workers, *self._retiring))

    @property
    def is_healthy(self) -> bool:
        """TorchServe's ping: as many healthy workers as the minimum."""
        return sum(worker.is_healthy for worker in self._workers) >= self.min_workers

    @property
    def last_failure(self) -> Failure | None:
        """The latest failure of those that none of the workers has got over."""
        failures = [worker.last_failure for worker in self._workers if worker.last_failure]
        return max(failures, key=attrgetter("moment"), default=None)

    def reconfigure(self, settings: ModelSettings) -> None:
        """Have workers that are started from now on made for other settings."""
        self._model = replace(self._model, settings=settings)

    def begin_order(self, low: int, high: int) -> WorkerOrder:
        """Put an order in force: it supersedes the one before, unless that has the same numbers.

        To carry it out is `resize`, perhaps later.

        Raises:
            NotEnoughDevices: It cannot be carried out.
        """
        self._check_capacity(high)
        if (low, high) != (self.order.low, self.order.high):
            self.order.superseded.set()
            self.order = WorkerOrder(low, high)
        return self.order

    def resize(self, min_workers: int, max_workers: int) -> Resized:
        """Forget those given up, start up to the minimum, take out what is over the maximum.

        Raises:
            NotEnoughDevices: There are not even GPUs for one worker of a parallel model.
        """
        capacity = self._check_capacity(max_workers)
        self.min_workers, self.max_workers = min(min_workers, capacity), min(max_workers, capacity)
        return self._bring_between(self.min_workers, self.max_workers)

    def set_current_count(self, count: int) -> Resized:
        """Have ``count`` workers for now; minimum and maximum stay, and bound it."""
        count = min(max(count, self.min_workers), self.max_workers)
        return self._bring_between(count, count)

    def take_out(self, worker: WorkerSupervisor) -> list[WorkerSupervisor]:
        """Take out one worker, whatever the minimum; returns it, if it is there to be retired."""
        if worker not in self._workers:
            return []
        self._workers.remove(worker)
        if worker.is_stopped:
            return []
        self._retiring.add(worker)
        self._update_is_open()
        return [worker]

    async def retire(self, workers: Iterable[WorkerSupervisor], drain: float) -> None:
        """End workers; each may finish its batch for ``drain`` seconds."""
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.stop(drain))

    async def close(self, drain: float) -> None:
        """End all workers, also those that somebody has begun to retire."""
        self.resize(0, 0)
        await self.retire(list(self._retiring), drain)

    def _bring_between(self, low: int, high: int) -> Resized:
        self._workers = [worker for worker in self._workers if not worker.is_stopped]
        count = min(max(len(self._workers), low), high)
        is_bound_to_cores = self._host.cpu_launcher and not self._model.has_ranks
        keep = 0 if is_bound_to_cores and count != len(self._workers) else count
        retired = [self._workers.pop() for _ in range(len(self._workers) - keep)]
        started = [self._add(count) for _ in range(count - len(self._workers))]
        self._retiring.update(retired)
        self._update_is_open()
        return Resized(started, retired)

    def _check_capacity(self, max_workers: int) -> int:
        """The most workers that there are devices for.

        Raises:
            NotEnoughDevices: None, and any are wanted.
        """
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
        """Note whether anybody can: workers have come or gone, have loaded, or have failed to."""
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
        worker = WorkerSupervisor(
            worker_id=worker_id,
            spec=replace(spec, on_metric_line=self._metrics.printed),
            # A parallel worker sees its own GPUs only, and counts them from 0.
            load=load_message(
                model, host.config, 0 if level and gpus else gpu, self._metrics.declarations
            ),
            timeouts=WorkerTimeouts(
                startup=settings.startup_timeout, retry_window=settings.max_retry_timeout
            ),
            make_dispatch=self._dispatch_strategy(),
            batcher=self._batcher,
            launcher=host.launcher,
            metrics=self._metrics,
        )
        worker.gpu_id = gpu
        self._gpus[worker] = gpus
        return worker

    def _dispatch_strategy(self) -> MakeDispatch:
        def has_workers_left() -> bool:
            # Once nobody is, nobody comes to answer what is queued: that has been failed already.
            return self.alive > 0

        settings = self._model.settings
        timeout = None if settings.debugged else settings.response_timeout
        if settings.asynchronous:
            # TorchServe never enforced it there; long generations rely on that where nobody set it.
            is_chosen = settings.origins.get("response_timeout") != "server"
            limit = settings.outstanding_batches or MAX_IN_FLIGHT
            timeout = timeout if is_chosen else None
            return partial(Async, timeout=timeout, has_workers_left=has_workers_left, limit=limit)
        if settings.continuous_batching:
            return partial(ContinuousBatching, timeout=timeout, has_workers_left=has_workers_left)
        return partial(
            dispatch_batches,
            timeout=timeout,
            has_workers_left=has_workers_left,
            budget=self._retry_budget,
            outstanding=settings.outstanding_batches,
            devices=max(1, self._model.parallel_level),
        )
