"""A batch, its reply, the next batch; one that failed is split before another is asked for."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from marserve.backend.protocol import Reply
from marserve.frontend.batching.batches import Batch, Reason, failure_of
from marserve.frontend.batching.isolation import BatchSplitting, RetryBudget
from marserve.frontend.batching.jobs import Job
from marserve.frontend.workers.dispatch.strategy import OUT_OF_MEMORY, DispatchStrategy, InFlight

# Why a batch is a part of one that failed.
_PARTS = (Reason.ISOLATION, Reason.OUT_OF_MEMORY)


@dataclass(eq=False)
class Batched(DispatchStrategy):
    """See the module.

    Args:
        budget: What the model may spend on splitting batches that failed.
    """

    budget: RetryBudget
    #: What was sent and not answered, in that order; for a part of a batch that failed, how that is
    #: being split.
    _in_flight: dict[Batch, BatchSplitting | None] = field(default_factory=dict, init=False)

    @property
    def is_busy(self) -> bool:
        """See `DispatchStrategy.is_busy`."""
        return bool(self._in_flight)

    def run(self, batch: Batch) -> None:
        """See `BatchRunner.run`."""
        self._run(batch, None)

    def _run(self, batch: Batch, splitting: BatchSplitting | None) -> None:
        self._in_flight[batch] = splitting
        self._send(batch.inputs, partial(self._on_reply, batch), batch.run_as)

    def _on_reply(self, batch: Batch, reply: Reply) -> None:
        if reply.more:
            batch.push(reply)
            return
        if batch not in self._in_flight:  # lost while the refusal to send it was on its way
            return
        splitting = self._in_flight.pop(batch)
        took = time.monotonic() - batch.closed
        succeeded = reply.code == 200
        self.batcher.record(batch, took, succeeded=succeeded)
        if splitting is None:
            self.budget.earn(took)
        elif batch.reason is Reason.ISOLATION:
            self.budget.spend(took)
        if splitting is not None or not succeeded:
            self._split(batch, splitting, reply)
        else:
            self._ask(batch)
        # The worker has its next batch already: it need not wait while these answers are written.
        if succeeded:
            self._count(batch, took, reply)
            batch.deliver(reply.predictions)
        else:
            self.metrics.batch_failed()

    def _count(self, batch: Batch, took: float, reply: Reply) -> None:
        # Parts of a batch have not waited in the queue, at least not for that.
        waited = batch.waited if batch.reason not in _PARTS else None
        queued = batch.closed - batch.jobs[-1].arrived
        self.metrics.batch_done(
            batch.ids, len(batch), queued, took, reply, waited=waited, held=batch.held
        )

    def _split(self, batch: Batch, splitting: BatchSplitting | None, reply: Reply) -> None:
        """Run the next part of a batch that failed; ask for another batch when all are answered."""
        if splitting is None:
            isolates = self.batcher.batching.isolates and self.budget.has_credit
            splitting = BatchSplitting(len(batch), isolates=isolates)
        if reply.code == 200:
            splitting.succeeded()
        else:
            is_memory = reply.code == OUT_OF_MEMORY
            reason = Reason.OUT_OF_MEMORY if is_memory else Reason.ISOLATION
            splitting.failed(batch.jobs, failure_of(reply), reason, batch.run_as)
        part = splitting.next_part()
        if part is None:
            if splitting.too_large:
                self.batcher.out_of_memory(splitting.too_large)
            self._ask(batch)
            return
        if splitting.runs == 1:
            self.metrics.batch_isolated()
        run_as = self.batcher.batching.run_as(len(part.jobs))
        predicted = self.batcher.costs.mean(run_as)
        half = Batch(part.jobs, time.monotonic(), part.reason, run_as, predicted)
        self.batcher.replace(batch, half)
        self._run(half, splitting)

    def _batches_in_flight(self) -> Iterable[Batch]:
        return self._in_flight

    def _take_in_flight(self) -> InFlight:
        in_flight, self._in_flight = self._in_flight, {}
        suspected: list[Job] = []
        others: list[Job] = []
        blamed = self._blamed(list(in_flight))
        for batch, splitting in in_flight.items():
            self.batcher.record(batch, time.monotonic() - batch.closed, succeeded=False)
            (suspected if batch in blamed else others).extend(batch.jobs)
            others.extend(splitting.waiting if splitting is not None else ())
        return suspected, others

    def _blamed(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Which of those in flight may have cost the worker its life."""
        return batches
