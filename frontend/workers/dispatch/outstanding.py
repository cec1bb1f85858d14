"""Several batches outstanding at one worker, so that it never waits for the next.

A worker whose stages overlap (`backend.pipeline`) has a batch in each of them, and the next may lie
in its wire. Elsewhere that gains little (a no-op on two cores: 0.95 at batch 1, 1.06 at 32).

To the batcher such a worker is idle and busy at once, and of the idle ones the last choice. A
policy so sees as many workers as there are batches on their way and places for more; the cost that
is learnt of a batch grows with their number alike, and the batches per second it counts on stay
true (Little's law).

A request that has left can neither be joined by others nor be overtaken by a more urgent one. So a
worker whose stages overlap asks for each batch, and has at most one that it has not asked behind.
(With all sent at once, in a simulation at half the load, 3 % kept a latency goal of four batches;
this way all did.)

A worker that dies had begun with some of its batches; the others in its wire hardly had a part in
that. Nothing is sent behind a request that has been in a crash before until it is answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from marserve.backend.protocol import STAGES, Reply
from marserve.frontend.batching.batches import Batch
from marserve.frontend.workers.connection import WorkerConnection
from marserve.frontend.workers.dispatch.batched import Batched, DispatchStrategy


@dataclass(eq=False)
class OutstandingBatches(Batched):
    """See the module; ``limit`` is the most batches outstanding."""

    limit: int
    #: Batches behind which the worker has asked for another.
    _asked_behind: set[Batch] = field(default_factory=set, init=False)
    _is_asking: bool = field(default=False, init=False)
    _quarantined: Batch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        overlaps = self.connection.overlaps
        self._max_unasked = max(1, self.limit - STAGES) if overlaps else self.limit

    @property
    def outstanding(self) -> int:
        """See `BatchRunner.outstanding`."""
        return len(self._in_flight)

    def run(self, batch: Batch) -> None:
        """See `BatchRunner.run`."""
        self._is_asking = False
        if batch.jobs[0].crashes:
            self._quarantined = batch
        super().run(batch)
        # Later: at once, a long queue would be worked off in ever deeper calls.
        self._loop.call_soon(self._ask)

    def _on_reply(self, batch: Batch, reply: Reply) -> None:
        if reply.asks:
            self._asked_behind.add(batch)
            self._ask()
            return
        if not reply.more:
            self._asked_behind.discard(batch)
        super()._on_reply(batch, reply)

    def _ask(self, done: Batch | None = None) -> None:
        """See `DispatchStrategy._ask`; nothing while there is no room, or it has asked already."""
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
            return batches[:1]  # it runs one after the other, and all it has answered we have read
        # Those that it has asked behind, and one it may have begun with before it asks.
        begun = [batch for batch in batches if batch in self._asked_behind]
        begun += [batch for batch in batches if batch not in self._asked_behind][:1]
        return [self._quarantined] if self._quarantined in begun else begun


def dispatch_batches(
    connection: WorkerConnection,
    *common: Any,
    outstanding: int | None = None,
    devices: int = 1,
    **settings: Any,
) -> DispatchStrategy:
    """Serve a worker that is ready, with as many batches outstanding as it can use.

    That is ``outstanding``; or, where that is None, as many as it has devices and three more where
    its stages overlap (the rule of AWS Neuron's NEURON_MAX_NUM_INFERS), else one.
    """
    limit = outstanding or (devices + STAGES if connection.overlaps else 1)
    strategy = Batched if limit == 1 else partial(OutstandingBatches, limit=limit)
    return strategy(connection, *common, **settings)
