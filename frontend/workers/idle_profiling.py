"""Measures the costs of batch sizes while a model is idle, after its settings were changed.

One worker runs batches of samples as during a load, but with a message for each run, and may get a
request between two runs. So a request waits for one run at most, and only if all other workers are
busy. Profiling starts when there was no request for a moment, pauses when one arrives, and
continues in the next idle moment.

A worker that is lost in a run is replaced like any other, and the sizes are not tried again.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from marserve.backend.protocol import BatchCost, Profile, Profiled
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.options import Batching
from marserve.frontend.workers.dispatch.batched import Batched
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
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        #: The worker that measures, and its results.
        self._worker: Batched | None = None
        self._costs: list[BatchCost] = []
        #: The worker with an unfinished run, which may be of sizes that are no longer pending.
        self._running: Batched | None = None

    def begin(self, sizes: Sequence[int], batching: Batching) -> None:
        """Measure the sizes whose costs are not known, from the next idle moment on."""
        self.stop()
        costs = self._batcher.costs
        self._longest = min(_LONGEST_SECONDS, _SHARE_OF_GOAL * batching.goal)
        self.pending = [
            size
            for size in sizes
            if not costs.knows(size) and (size == sizes[0] or costs.mean(size) <= self._longest)
        ]
        self._wait()

    def stop(self) -> None:
        """Start no further runs. Safe to call twice."""
        self.pending = ()
        self._worker = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        if self.pending and self._timer is None:
            self._timer = self._loop.call_later(_QUIET_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
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
        self._wait()

    def _run(self) -> None:
        idle = self._batcher.workers.waiting
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
        worker.profile(message, expected, partial(self._on_profiled, self._worker))

    def _on_profiled(self, worker: Batched | None, profiled: Profiled) -> None:
        self._running = None
        if worker is not self._worker or not self.pending:  # other sizes are pending now
            return
        why = profiled.poisoned or profiled.note
        has_ended = bool(why) or len(profiled.costs) == len(self.pending)
        learn_costs(self._batcher, profiled, known=len(self._costs), is_complete=has_ended)
        self._costs = profiled.costs
        if has_ended:
            self._end(why)
        else:
            self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        is_idle = not self._batcher.queue and not self._batcher.workers.busy
        if self.pending and self._running is None and is_idle:
            self._run()
        self._wait()

    def _end(self, why: str) -> None:
        measured = ", ".join(f"{size} in {1000 * s:.3g} ms" for size, s, _ in self._costs) or "none"
        logger.info(
            "%s: batch sizes profiled while idle: %s%s", self._name, measured, why and f" - {why}"
        )
        self.stop()
