"""The dispatch strategy with several batches outstanding, so that the worker never waits for one.

For workers whose stages do not overlap the gain is small (a no-op on two cores: 0.95 of the
throughput at batch 1, 1.06 at 32).

For the batcher such a worker is idle and busy at the same time, and is chosen after the other idle
ones. A policy counts a worker for each outstanding batch; the learnt cost of a batch grows by the
same factor, and the throughput that the policy calculates stays correct (Little's law).

A request that was sent can neither be joined by others nor be overtaken by a more urgent one. So a
worker whose stages overlap requests each batch (`NextBatch`), and at most one is sent without a
request. (In a simulation at half the load, with a latency goal of four batches, 3 % of the requests
were in time when all batches were sent at once, and all of them this way.)

When a worker dies, only the batches that it had started may be the cause, not those in its socket.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from marserve.backend.protocol import (
    STAGES,
    Compare,
    Compared,
    NextBatch,
    Profile,
    Profiled,
    Reply,
)
from marserve.frontend.batching.batches import Batch
from marserve.frontend.workers.connection import BatchAnswer, WorkerConnection
from marserve.frontend.workers.dispatch.batched import Batched, DispatchStrategy


@dataclass(eq=False)
class OutstandingBatches(Batched):
    """Keeps up to ``limit`` batches outstanding."""

    can_profile: ClassVar[bool] = False  # others would run meanwhile, which costs are not of
    #: Batches behind which the worker has requested another.
    _requested_behind: set[Batch] = field(default_factory=set, init=False)
    _is_requesting: bool = field(default=False, init=False)
    _quarantined: Batch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        overlaps = self.connection.overlaps
        in_stages = overlaps + STAGES - 1
        self._max_unrequested = max(1, self.limit - in_stages) if overlaps else self.limit

    @property
    def outstanding(self) -> int:
        """The number of batches outstanding."""
        return len(self._in_flight)

    def to_saturate(self, size: int) -> int:
        """Return the requests of all batches outstanding, and of one that is filled behind them."""
        return (self.limit + 1) * size

    def run_samples(
        self, message: Profile | Compare, seconds: float, on_reply: Callable[[Any], None]
    ) -> None:
        """Make the worker run a batch of samples, after those that were sent before."""
        del seconds
        self._control_messages += 1
        self.connection.request(message, self.timeout, partial(self._on_samples, on_reply))

    def _on_samples(self, on_reply: Callable[[Any], None], reply: Profiled | Compared) -> None:
        self._control_messages -= 1
        self._note_drained()
        on_reply(reply)

    def run(self, batch: Batch) -> None:
        """Send a batch to the worker, and request the next one."""
        self._is_requesting = False
        if batch.jobs[0].crashes or batch.jobs[0].is_suspected:
            self._quarantined = batch
        super().run(batch)
        # Not at once: with a long queue the calls would be nested too deep.
        self._loop.call_soon(self._ask)

    def _on_reply(self, batch: Batch, reply: BatchAnswer) -> None:
        if isinstance(reply, NextBatch):
            self._requested_behind.add(batch)
            self._ask()
            return
        if isinstance(reply, Reply):
            self._requested_behind.discard(batch)
        super()._on_reply(batch, reply)

    def _ask(self, done: Batch | None = None) -> None:
        if done is not None:
            if done is self._quarantined:
                self._quarantined = None
            self.batcher.mark_done(done)
        if self._is_stopping:
            self._note_drained()
            return
        has_capacity = not self._quarantined and len(self._in_flight) < self.limit
        if has_capacity and not self._is_requesting:
            unrequested = sum(batch not in self._requested_behind for batch in self._in_flight)
            if unrequested < self._max_unrequested:
                self._is_requesting = True
                self.batcher.mark_idle(self)

    def _blamed(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        if not self.connection.overlaps:
            return batches[:1]  # it runs them in order, and its earlier replies were read
        # Those behind which it has requested another, and one that it may have just started.
        started = [batch for batch in batches if batch in self._requested_behind]
        started += [batch for batch in batches if batch not in self._requested_behind][:1]
        return [self._quarantined] if self._quarantined in started else started


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

    By default the number is one. Where stages overlap, it is three (`STAGES`) more than the number
    of devices, or of batches that the worker's model takes at a time if those are more: the rule of
    AWS Neuron's NEURON_MAX_NUM_INFERS. ``batched`` makes the strategy for one batch, ``several``
    that for more; the other arguments are theirs.
    """
    overlaps = connection.overlaps
    limit = outstanding or (max(devices, overlaps) + STAGES if overlaps else 1)
    make = batched if limit == 1 else partial(several, limit=limit)
    return make(connection, *common, **settings)
