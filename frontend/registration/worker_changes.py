"""Changes of the number of workers of a model, and waits for their effects.

The later of two changes is valid: a call that waits for the earlier one raises `Conflict`.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from marserve.frontend.aio.background import BackgroundTasks, unless
from marserve.frontend.errors import Conflict, ModelNotFound, ModelUnfit, WorkersFailed
from marserve.frontend.registration.snapshot import Snapshots
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.worker_pool import WorkerOrder
from marserve.frontend.workers.failures import ConnectionLost, LoadFailed
from marserve.frontend.workers.supervisor import WorkerSupervisor

_WITH_CODE = (ConnectionLost, LoadFailed)


@dataclass(eq=False)
class WorkerChanges:
    """Changes the workers of models, which may be unregistered meanwhile."""

    registry: ModelRegistry
    background: BackgroundTasks
    snapshots: Snapshots
    timeout: float  # seconds in which workers finish their requests before they stop

    async def scale(self, model: ModelVersion, version: str | None, low: int, high: int) -> None:
        """Set the minimum and maximum of workers; ``version`` is the one that the client named.

        Raises:
            ModelNotFound: The model was unregistered since it was found.
            Conflict: A later order is valid.
            WorkersFailed: A new worker failed to start.
        """
        if model not in self.registry:
            raise ModelNotFound(f"Model not found: {model.name}")
        order = model.workers.begin_order(low, high)
        if not high:  # the queue is finished first
            model.admission.refusal = model.admission.no_worker
            await self._unless_superseded(model, order, model.admission.drain(self.timeout))
        started, retired = model.workers.resize(low, high)
        model.admission.refusal = None
        await self.snapshots.save()

        async def wait() -> None:
            await self._retire(model, retired)
            await _wait_until_up(model, version, started)
            for worker in list(model.workers):  # also those of an earlier order
                await worker.first_outcome()

        await self._unless_superseded(model, order, wait())

    async def wait_until_up(
        self, model: ModelVersion, order: WorkerOrder, started: Sequence[WorkerSupervisor]
    ) -> None:
        """Wait until the first workers of a model are READY.

        Raises:
            Conflict: A later order is valid.
            WorkersFailed: A worker failed to start.
        """
        waiting = _wait_until_up(model, model.version, started)
        await self._unless_superseded(model, order, waiting)

    async def set_current_count(self, model: ModelVersion, count: int) -> None:
        """Set the current number of workers; a new one that fails to start is removed.

        Raises:
            WorkersFailed: A new worker failed to start.
        """
        if model not in self.registry:
            return
        started, retired = model.workers.set_current_count(count)
        await self._retire(model, retired)
        try:
            await _wait_until_up(model, model.version, started)
        except WorkersFailed:
            for worker in started:
                await model.workers.retire(model.workers.remove(worker), 0)
            raise

    async def _unless_superseded(
        self, model: ModelVersion, order: WorkerOrder, waiting: Coroutine[Any, Any, None]
    ) -> None:
        try:
            await unless(order.superseded, waiting)
        except WorkersFailed:  # perhaps of a worker that the later order has removed
            if not order.superseded.is_set():
                raise
        if not order.superseded.is_set():
            return
        which = f"model {model.name} version {model.version}"
        if model not in self.registry:
            raise Conflict(f"A later request unregistered {which}.")
        low, high = model.workers.order.low, model.workers.order.high
        raise Conflict(
            f"A later request changed the workers of {which}, which stays registered: "
            f"min_worker={low}, max_worker={high}."
        )

    async def _retire(self, model: ModelVersion, workers: list[WorkerSupervisor]) -> None:
        """Stop workers, even if the caller is cancelled."""
        if workers:
            await self.background.start(model.workers.retire(workers, self.timeout))


async def _wait_until_up(
    model: ModelVersion, version: str | None, workers: Sequence[WorkerSupervisor]
) -> None:
    """Wait until all workers are READY; raises WorkersFailed for the first that fails."""
    # No TaskGroup: before Python 3.13 its failure leaves Task.cancelling() above 0, so that an
    # order that is superseded just then would end as if the server were stopping.
    outcomes = [asyncio.ensure_future(worker.first_outcome()) for worker in workers]
    try:
        for outcome in asyncio.as_completed(outcomes):
            failure = await outcome
            if failure is not None:
                status = failure.code if isinstance(failure, _WITH_CODE) else None
                kind = ModelUnfit if status == ModelUnfit.status else WorkersFailed
                raise kind(
                    f"Failed to start workers for model {model.name} version: "
                    f"{version or 'null'}. {failure}",
                    status=status,
                )
    finally:
        for outcome in outcomes:
            outcome.cancel()
