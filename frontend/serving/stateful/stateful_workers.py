"""The workers of a stateful model version, each with its own batcher and slots for sequences."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from marserve.backend.protocol import Load
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.serving.dispatch_choice import DispatchKinds
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.stateful.model_sequences import ModelSequences, SequenceHeaders
from marserve.frontend.serving.worker_pool import Resized, WorkerPool
from marserve.frontend.serving.worker_spec import ServedModel
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.workers.dispatch.stateful import (
    StatefulAsync,
    StatefulBatched,
    StatefulContinuousBatching,
    StatefulDispatch,
    StatefulOutstandingBatches,
)
from marserve.frontend.workers.supervisor import WorkerSupervisor


class StatefulWorkerPool(WorkerPool):
    """A pool in which each worker has a batcher; all of them share what ``batcher`` learns."""

    def __init__(
        self,
        model: ServedModel,
        host: WorkerHost,
        batcher: Batcher,
        metrics: ModelMetrics,
        on_closed: Callable[[], None],
    ) -> None:
        super().__init__(model, host, batcher, metrics, on_closed)
        self.sequences = ModelSequences(model.settings, SequenceHeaders(host.config), metrics)
        self._table = self.sequences.table

    @property
    def batchers(self) -> list[Batcher]:
        """The batchers of the workers; without workers, the one that they will share with."""
        return [worker.batcher for worker in self._gpus] or [self._batcher]

    def sequences_of(self, worker: WorkerSupervisor) -> int:
        """Return how many sequences a worker has."""
        dispatch = worker.dispatch
        return len(dispatch.open) if isinstance(dispatch, StatefulDispatch) else 0

    def reconfigure(self, settings: ModelSettings) -> None:
        """Use other settings, also for the limits of sequences."""
        super().reconfigure(settings)
        self._table.limits = settings.sequence_limits
        self._set_slots()

    def _set_slots(self) -> None:
        self._table.resize(self._model.settings.slots_per_worker(self.min_workers))

    def _bring_between(self, low: int, high: int) -> Resized:
        self._set_slots()
        return super()._bring_between(low, high)

    def _by_retirement(self) -> list[WorkerSupervisor]:
        return sorted(super()._by_retirement(), key=self.sequences_of)

    def _make_batcher(self) -> Batcher:
        loop, batching = asyncio.get_running_loop(), self._model.settings.worker_batching
        return Batcher(JobQueue(batching.queue_size), batching, loop, parent=self._batcher)

    def _load_message(self, gpu: int | None) -> Load:
        return replace(super()._load_message(gpu), stateful=True)

    def _dispatch_kinds(self) -> DispatchKinds:
        return DispatchKinds(
            partial(StatefulBatched, table=self._table),
            partial(StatefulOutstandingBatches, table=self._table),
            partial(StatefulContinuousBatching, table=self._table),
            partial(StatefulAsync, table=self._table),
        )
