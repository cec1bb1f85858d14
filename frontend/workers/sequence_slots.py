"""The slots of one worker of a stateful model; see `batching.sequence_table`."""

from typing import Protocol, cast

from marserve.backend.protocol import EndSequence
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.jobs import Job
from marserve.frontend.batching.sequences.sequence_table import SequenceTable
from marserve.frontend.batching.sequences.stateful_sequence import (
    Reason,
    SequenceJob,
    StatefulSequence,
)


class Worker(Protocol):
    """A worker that is ready."""

    @property
    def is_accepting(self) -> bool:
        """Whether it sends further batches."""

    def end_sequence(self, end: EndSequence) -> None:
        """Tell the handler that a sequence is over, if it wants to know."""

    def stop_accepting(self) -> None:
        """Ask for no more batches."""


class WorkerSlots:
    """See `batching.sequences.Slots`; they are those of a worker's process, one after the other."""

    def __init__(self, table: SequenceTable, batcher: Batcher) -> None:
        self.open: dict[StatefulSequence, None] = {}
        self.is_closing = False
        self.batcher = batcher
        self._table = table
        self._worker: Worker | None = None

    # What the worker does

    @property
    def has_jobs(self) -> bool:
        """Whether any job of its sequences is not answered yet."""
        return any(sequence.has_jobs for sequence in self.open)

    def serve(self, worker: Worker) -> None:
        """The worker is ready."""
        self._worker = worker
        self._table.add(self)

    def close(self) -> None:
        """The worker is to be stopped when it has answered what was accepted."""
        if not self.is_closing:
            self._table.close(self)

    def lose(self, cause: str) -> None:
        """The worker is gone; the jobs that it had are failed by the caller."""
        self._worker = None
        if self.is_closing:
            self._table.lose(self, "Its worker was stopped.", Reason.WORKER_STOPPED)
        else:
            self._table.lose(self, f"Worker died. {cause}".rstrip(), Reason.WORKER_DIED)

    # What the table asks for

    @property
    def is_accepting(self) -> bool:
        """See `Slots.is_accepting`."""
        worker = self._worker
        return worker is not None and worker.is_accepting and not self.is_closing

    def put(self, job: SequenceJob) -> None:
        """See `Slots.put`."""
        self.batcher.put(cast("Job", job))

    def discard(self, job: SequenceJob) -> None:
        """See `Slots.discard`."""
        self.batcher.discard(cast("Job", job))

    def end_sequence(self, sequence_id: str, reason: Reason) -> None:
        """See `Slots.end_sequence`."""
        if self._worker is not None:
            self._worker.end_sequence(EndSequence(sequence_id, reason.value))

    def on_closed(self) -> None:
        """See `Slots.on_closed`."""
        if self._worker is not None:
            self._worker.stop_accepting()
