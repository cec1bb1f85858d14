"""Dispatch to a worker of a stateful model: each strategy, with slots for sequences.

The slots belong to a process: when it ends, its sequences end. Their requests are never retried,
because no other worker has their state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from marserve.backend.protocol import EndSequence, Reply
from marserve.frontend.batching.batches import Batch, failure_of
from marserve.frontend.batching.isolation.splitting import BatchSplitting
from marserve.frontend.batching.jobs import Job
from marserve.frontend.batching.sequences.sequence_table import SequenceTable
from marserve.frontend.batching.sequences.stateful_sequence import (
    Reason,
    SequenceJob,
    StatefulSequence,
)
from marserve.frontend.errors import WorkerDied
from marserve.frontend.workers.dispatch.asynchronous import Async
from marserve.frontend.workers.dispatch.batched import OUT_OF_MEMORY, Batched, DispatchStrategy
from marserve.frontend.workers.dispatch.continuous_batching import ContinuousBatching
from marserve.frontend.workers.dispatch.outstanding import OutstandingBatches


@dataclass(eq=False)
class StatefulDispatch(DispatchStrategy):
    """Adds slots to a strategy, as the second base class; implements `batching.sequences.Slots`."""

    table: SequenceTable = field(kw_only=True)
    open: dict[StatefulSequence, None] = field(default_factory=dict, init=False)
    is_closing: bool = field(default=False, init=False)

    @property
    def is_busy(self) -> bool:
        """Whether a request is in flight, or waits in a sequence of the worker."""
        return super().is_busy or any(sequence.has_jobs for sequence in self.open)

    @property
    def is_accepting(self) -> bool:
        """Whether the worker accepts further sequences."""
        return super().is_accepting and not self.is_closing

    def start(self) -> None:
        """Offer the slots, then request the first batch."""
        self.table.add(self)
        super().start()

    def finish(self) -> None:
        """Stop when the requests that were accepted for its sequences are answered."""
        if not self.is_closing:
            self.table.close(self)

    def on_connection_lost(self, cause: str) -> None:
        """End the sequences, and fail their requests."""
        self.stop_accepting()
        if self.is_closing:
            self.table.lose(self, "Its worker was stopped.", Reason.WORKER_STOPPED)
        else:
            self.table.lose(self, f"Worker died. {cause}".rstrip(), Reason.WORKER_DIED)
        for job in self.batcher.queue.clear():
            job.fail(WorkerDied(cause))
        super().on_connection_lost(cause)

    # Called by the table

    def put(self, job: SequenceJob) -> None:
        """Put a job into the worker's batcher; raises Overloaded."""
        self.batcher.put(cast("Job", job))

    def discard(self, job: SequenceJob) -> None:
        """Remove a job from the worker's batcher."""
        self.batcher.queue.discard(cast("Job", job))

    def end_sequence(self, sequence_id: str, reason: Reason) -> None:
        """Send the end of a sequence, if the handler has a hook for it."""
        if self.connection.ends_sequences and not self._is_lost:
            self._control_messages += 1
            end = EndSequence(sequence_id, reason.value)
            self.connection.request(end, self.timeout, self._on_sequence_ended)

    def on_closed(self) -> None:
        """Stop: no sequence is left of a worker that is closing."""
        self.stop_accepting()

    def _on_sequence_ended(self, reply: Reply) -> None:
        self._control_messages -= 1
        if reply.code != 200:
            self.metrics.sequence_end_failed()
        self.metrics.reported(reply.metrics)
        self._note_drained()

    def _to_retry(self, _suspected: Sequence[Job], _others: Sequence[Job]) -> list[Job]:
        return []


@dataclass(eq=False)
class StatefulBatched(Batched, StatefulDispatch):
    """Sends one batch at a time. A batch that failed is not run again.

    The handler may have changed the state of some of its sequences already.
    """

    def _finish(
        self, batch: Batch, _splitting: BatchSplitting | None, took: float, reply: Reply
    ) -> None:
        # Jobs are answered before the next batch is requested, so that it contains the next job of
        # each sequence. Clients are written to later all the same (`PendingSequenceJob.resolve`).
        if reply.code == 200:
            self.batcher.record(batch, took, succeeded=True)
            self._count(batch, took, reply)
            batch.deliver(reply.predictions)
        else:
            self.batcher.history.add(batch, took, succeeded=False)
            self.metrics.failed_batches.update(1)
            self.metrics.reported(reply.metrics)
            batch.fail(failure_of(reply))
            if reply.code == OUT_OF_MEMORY and len(batch) > 1:
                self.batcher.out_of_memory(batch.run_as)
        batch.release()
        self._ask(batch)


@dataclass(eq=False)
class StatefulOutstandingBatches(OutstandingBatches, StatefulBatched):
    """Keeps several batches outstanding."""


@dataclass(eq=False)
class StatefulContinuousBatching(ContinuousBatching, StatefulDispatch):
    """Sends unfinished requests again, step by step."""


@dataclass(eq=False)
class StatefulAsync(Async, StatefulDispatch):
    """Sends each request at once."""
