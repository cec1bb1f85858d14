"""Measures batch sizes while a model is idle, for settings that were changed while it serves.

One worker runs batches of samples, as at load, but with a message for each run. Between two runs it
can be given a request; so the price for a request is to wait for one run at most, and only if all
other workers are busy. Profiling begins when no request was there for a moment, stops as soon as
one comes, and goes on in the next idle moment.

A worker that is lost over it is replaced like any other, and sizes are not tried again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from marserve.backend.protocol import BatchCost, Profile, Profiled
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.options import Batching
from marserve.frontend.workers.dispatch.batched import Batched

logger = logging.getLogger(__name__)

# How long there must have been no request.
_QUIET_SECONDS = 1.0
# What all runs together may take, as at load; and a single one, where no goal says less.
_SECONDS = 2.0
_LONGEST_SECONDS = 0.25
# A request may have to wait for a run and then for its own batch, within the goal.
_SHARE_OF_GOAL = 0.5


class IdleProfiling:
    """Profiles one model version in idle moments.

    Attributes:
        pending: The sizes that are still to be measured.
    """

    def __init__(self, name: str, batcher: Batcher) -> None:
        self.pending: Sequence[int] = ()
        self._name = name
        self._batcher = batcher
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        #: The worker that has begun, and what it has measured.
        self._worker: Batched | None = None
        self._costs: list[BatchCost] = []
        #: The worker that has a run under way, perhaps one of sizes that are not wanted any more.
        self._running: Batched | None = None

    def begin(self, sizes: Sequence[int], batching: Batching) -> None:
        """Measure those of the sizes whose cost is not known, from the next idle moment on."""
        self.stop()
        costs = self._batcher.costs
        self._longest = min(_LONGEST_SECONDS, _SHARE_OF_GOAL * batching.goal)
        self.pending = [
            size
            for size in sizes
            if not costs.knows(size) and (size == sizes[0] or costs.mean(size) <= self._longest)
        ]
        self._look_later()

    def stop(self) -> None:
        """Measure no more; a run that is under way ends by itself. Safe to call twice."""
        self.pending = ()
        self._worker = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        if self.pending and self._timer is None:
            self._timer = self._loop.call_later(_QUIET_SECONDS, self._look)

    def _look(self) -> None:
        """Go on if the model is idle, and look again later if not."""
        self._timer = None
        lost = self._running
        if lost is not None and not lost.is_accepting:
            self._running = None
            if lost is self._worker:
                self._end("the worker has ended meanwhile")
                return
        if self._worker is not None and not self._worker.is_accepting:
            self._worker = None
        if self._running is None and self._batcher.quiet_seconds >= _QUIET_SECONDS:
            self._run()
        self._look_later()

    def _run(self) -> None:
        idle = self._batcher.idle_runners
        worker, sizes = self._worker, list[int]()
        if worker is None or worker not in idle:
            able = (each for each in idle if isinstance(each, Batched) and each.can_profile)
            worker, sizes = next(able, None), list(self.pending)
        if worker is None:
            if idle:
                self._end("its workers cannot be measured between requests")
            return
        if sizes:
            self._worker, self._costs = worker, []
        expected = self._costs[-1].seconds if self._costs else self._batcher.costs.mean(1)
        self._running = worker
        message = Profile(sizes, _SECONDS, self._longest)
        worker.profile(message, expected, self._listener(self._worker))

    def _listener(self, worker: Batched | None) -> Callable[[Profiled], None]:
        """What takes the reply of a worker, unless other sizes are wanted meanwhile."""

        def on_reply(profiled: Profiled) -> None:
            self._running = None
            if worker is self._worker and self.pending:
                self._learn(profiled)

        return on_reply

    def _learn(self, profiled: Profiled) -> None:
        costs, why = profiled.costs, profiled.poisoned or profiled.note
        is_over = bool(why) or len(costs) == len(self.pending)
        new, self._costs = costs[len(self._costs) :], costs
        if costs and (new or is_over):
            self._batcher.seed(((cost.size, cost.seconds) for cost in new), is_complete=is_over)
        if profiled.too_large:
            self._batcher.out_of_memory(profiled.too_large, costs[-1].size if costs else 1)
        if is_over:
            self._end(why)
        elif not self._batcher.queued and not self._batcher.workers.busy:
            self._loop.call_soon(self._go_on)
        else:
            self._look_later()

    def _go_on(self) -> None:
        """Do the next run at once, unless a request has come."""
        batcher = self._batcher
        if (
            self.pending
            and self._running is None
            and not batcher.queued
            and not batcher.workers.busy
        ):
            self._run()
        self._look_later()

    def _end(self, why: str) -> None:
        measured = ", ".join(f"{size} in {1000 * s:.3g} ms" for size, s, _ in self._costs) or "none"
        logger.info(
            "%s: batch sizes profiled while idle: %s%s", self._name, measured, why and f" - {why}"
        )
        self.stop()
