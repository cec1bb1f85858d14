"""Measures the costs of batch sizes while a model is idle, after its settings were changed.

One worker runs batches of samples, and may get a request between two runs. So a request waits for
one run at most, and only if all other workers are busy. If the worker is lost in a run, the sizes
are not tried again.
"""

import asyncio
import logging
from collections.abc import Sequence

from marserve.backend.protocol import BatchCost, Profile
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.options import Batching
from marserve.frontend.workers.dispatch.batched import Batched, samples_run
from marserve.frontend.workers.load_results import learn_costs

logger = logging.getLogger(__name__)

# Seconds without a request after which the model counts as idle.
_QUIET_SECONDS = 1.0
# The time limit of all runs, as at load; and of a single one, without a shorter latency goal.
_SECONDS = 2.0
_LONGEST_SECONDS = 0.25
# A request may wait for a run and then for its own batch, within the latency goal.
_SHARE_OF_GOAL = 0.5


class IdleProfiling:
    """Profiles one model version in idle moments."""

    def __init__(self, name: str, batcher: Batcher) -> None:
        #: The sizes that are measured; empty when profiling has ended.
        self.pending: Sequence[int] = ()
        self._name = name
        self._batcher = batcher
        self._task: asyncio.Task[None] | None = None

    def begin(self, sizes: Sequence[int], batching: Batching) -> None:
        """Measure the sizes whose costs are not known, from the next idle moment on."""
        self.stop()
        costs = self._batcher.costs
        longest = min(_LONGEST_SECONDS, _SHARE_OF_GOAL * batching.goal)
        self.pending = [
            size
            for size in sizes
            if not costs.knows(size) and (size == sizes[0] or costs.mean(size) <= longest)
        ]
        if self.pending:
            self._task = asyncio.create_task(self._profile(longest), name="idle profiling")

    def stop(self) -> None:
        """Start no further runs. Safe to call twice."""
        self.pending = ()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _profile(self, longest: float) -> None:
        worker: Batched | None = None
        costs: list[BatchCost] = []
        why = ""
        await self._quiet_moment()
        while not why and len(costs) < len(self.pending):
            sizes: Sequence[int] = ()
            if worker not in self._batcher.workers.waiting:
                worker, sizes, costs = self._able_worker(), self.pending, []
            if worker is None:
                why = "its workers cannot be measured between requests"
                break
            expected = costs[-1].seconds if costs else self._batcher.costs.mean(1)
            message = Profile(list(sizes), _SECONDS, longest)
            profiled = await samples_run(worker, message, expected)
            if profiled is None:
                why = "the worker has ended meanwhile"
                break
            why = profiled.poisoned or profiled.note
            is_complete = bool(why) or len(profiled.costs) == len(self.pending)
            learn_costs(self._batcher, profiled, known=len(costs), is_complete=is_complete)
            costs = profiled.costs
            workers = self._batcher.workers
            if not is_complete and (self._batcher.queue or workers.busy or not workers.waiting):
                await self._quiet_moment()
        self.pending = ()
        measured = ", ".join(f"{size} in {1000 * s:.3g} ms" for size, s, _ in costs) or "none"
        logger.info(
            "%s: batch sizes profiled while idle: %s%s", self._name, measured, why and f" - {why}"
        )

    async def _quiet_moment(self) -> None:
        # No deadline: `stop` ends it.
        while True:
            await asyncio.sleep(_QUIET_SECONDS)
            if self._batcher.workers.waiting and self._batcher.quiet_seconds >= _QUIET_SECONDS:
                return

    def _able_worker(self) -> Batched | None:
        for each in self._batcher.workers.waiting:
            if isinstance(each, Batched) and each.can_profile and each.is_accepting:
                return each
        return None
