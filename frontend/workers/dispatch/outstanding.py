"""The dispatch strategy with several batches outstanding, so that the worker never waits for one.

A worker whose stages overlap (`backend.pipeline`) has a batch in each stage, and the next one may
be in its socket. For other workers that gains little (a no-op on two cores: 0.95 of the throughput
at batch 1, 1.06 at 32).

For the batcher such a worker is idle and busy at the same time, and the last choice among the idle
ones. So a policy sees as many workers as there are outstanding batches and room for more; the
learnt cost of a batch grows by the same factor, and the throughput that the policy calculates stays
right (Little's law).

A request that was sent can neither be joined by others nor be overtaken by a more urgent one. So a
worker whose stages overlap asks for each batch (`NextBatch`), and at most one batch is sent
without that. (In a simulation at half the load, with a latency goal of four batches, 3 % of the
requests were in time when all batches were sent at once, and all of them this way.)

When a worker dies, only the batches that it had begun may be the cause, not those in its socket.
No batch is sent behind a request that was in a crash before, or whose content has failed before,
until that is answered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from marserve.backend.protocol import STAGES, NextBatch, Reply
from marserve.frontend.batching.batches import Batch
from marserve.frontend.workers.connection import BatchAnswer, WorkerConnection
from marserve.frontend.workers.dispatch.batched import Batched, DispatchStrategy


@dataclass(eq=False)
class OutstandingBatches(Batched):
    """Keeps up to ``limit`` batches outstanding; see the module."""

    limit: int
    #: Batches behind which the worker has asked for another.
    _asked_behind: set[Batch] = field(default_factory=set, init=False)
    _is_asking: bool = field(default=False, init=False)
    _quarantined: Batch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        overlaps = self.connection.overlaps
        in_stages = overlaps + STAGES - 1
        self._max_unasked = max(1, self.limit - in_stages) if overlaps else self.limit

    @property
    def outstanding(self) -> int:
        """See `BatchRunner.outstanding`."""
        return len(self._in_flight)

    def to_saturate(self, size: int) -> int:
        """See `DispatchStrategy.to_saturate`: one more gathers behind those that are sent."""
        return (self.limit + 1) * size

    @property
    def can_profile(self) -> bool:
        """See `DispatchStrategy.can_profile`."""
        return False  # batches would be measured while others run

    def run(self, batch: Batch) -> None:
        """See `BatchRunner.run`."""
        self._is_asking = False
        if batch.jobs[0].crashes or batch.jobs[0].is_suspected:
            self._quarantined = batch
        super().run(batch)
        # Not at once: with a long queue the calls would nest ever deeper.
        self._loop.call_soon(self._ask)

    def _on_reply(self, batch: Batch, reply: BatchAnswer) -> None:
        if isinstance(reply, NextBatch):
            self._asked_behind.add(batch)
            self._ask()
            return
        if isinstance(reply, Reply):
            self._asked_behind.discard(batch)
        super()._on_reply(batch, reply)

    def _ask(self, done: Batch | None = None) -> None:
        """Ask for the next batch, if there is room and it has not asked already."""
        if done is not None:
            if done is self._quarantined:
                self._quarantined = None
            self.batcher.mark_done(done)
        if self._is_stopping:
            self._note_drained()
        elif not self._is_asking and not self._quarantined and len(self._in_flight) < self.limit:
            unasked = sum(batch not in self._asked_behind for batch in self._in_flight)
            if unasked < self._max_unasked:
                self._is_asking = True
                self.batcher.mark_idle(self)

    def _blamed(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        if not self.connection.overlaps:
            return batches[:1]  # it runs them in order, and its replies to earlier ones were read
        # Those behind which it has asked for another, and one that it may have just begun.
        begun = [batch for batch in batches if batch in self._asked_behind]
        begun += [batch for batch in batches if batch not in self._asked_behind][:1]
        return [self._quarantined] if self._quarantined in begun else begun


def dispatch_batches(
    connection: WorkerConnection,
    *common: Any,
    outstanding: int | None = None,
    devices: int = 1,
    batched: Callable[..., DispatchStrategy] = Batched,
    several: Callable[..., DispatchStrategy] = OutstandingBatches,
    **settings: Any,
) -> DispatchStrategy:
    """Make the strategy for a ready worker by the number of batches that may be outstanding.

    Args:
        connection: To the worker.
        common: The other positional arguments of the strategy.
        outstanding: The number; if None, the number of devices (or of batches that the worker's
            model takes at a time, if those are more) and three more where stages overlap (the rule
            of AWS Neuron's NEURON_MAX_NUM_INFERS), else one.
        devices: Devices of the worker.
        batched: Makes the strategy for one batch.
        several: Makes the strategy for more.
        settings: The keyword arguments of the strategy.
    """
    overlaps = connection.overlaps
    limit = outstanding or (max(devices, overlaps) + STAGES if overlaps else 1)
    make = batched if limit == 1 else partial(several, limit=limit)
    return make(connection, *common, **settings)
