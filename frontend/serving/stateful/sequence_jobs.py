"""The job of a request to a stateful model."""

import asyncio
from dataclasses import dataclass, field

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import OnRead
from marserve.frontend.batching.sequences.stateful_sequence import Reason, StatefulSequence
from marserve.frontend.errors import SequenceOver, ServeError, WorkerDied
from marserve.frontend.serving.predict_request import PendingJob
from marserve.frontend.serving.stateful.model_sequences import ModelSequences


@dataclass(slots=True, eq=False, kw_only=True)
class PendingSequenceJob(PendingJob):
    """A pending job that is also a `batching.sequences.SequenceJob`.

    The next request of a sequence waits for the worker, not for the client: a request that is
    cancelled or expired holds it up until the worker has answered.
    """

    sequences: ModelSequences
    sequence_id: str
    starts: bool
    ends: bool
    sequence: StatefulSequence = field(init=False)
    is_first: bool = field(default=False, init=False)
    is_answered: bool = field(default=False, init=False)
    has_left: bool = field(default=False, init=False)

    def begin_sequence(self) -> None:
        """Mark the input as the first of its sequence."""
        self.is_first = True
        self.sequences.names.mark_start(self.input.headers)

    # Called for the worker

    def resolve(self, prediction: Prediction) -> None:
        """Answer with a prediction, after the worker has received its next batch."""
        self._read_headers(prediction)
        self.sequences.table.finished(self)
        asyncio.get_running_loop().call_soon(PendingJob.resolve, self, prediction)

    def push(self, piece: Prediction, *on_read: OnRead) -> None:
        """Answer with a piece; with continuous batching the first one admits the next request."""
        is_first_piece = self.stream is None
        self._read_headers(piece)
        PendingJob.push(self, piece, *on_read)
        if self.sequences.is_continuous:
            if is_first_piece:
                self.sequences.table.started(self)
            if not self.is_open:  # it is not sent for another step
                self.sequences.table.finished(self)

    def fail(self, error: ServeError) -> None:
        """Answer with a failure; the death of the worker ends the sequence."""
        if self.dispatched is not None:
            if isinstance(error, WorkerDied):
                error = SequenceOver(self.sequence_id, error.message)
            self.sequences.table.finished(self, failed=True)
        PendingJob.fail(self, error)

    def _read_headers(self, prediction: Prediction) -> None:
        """Add the sequence to the answer; end the sequences that the handler says have ended."""
        names, headers, table = self.sequences.names, prediction.headers, self.sequences.table
        self.is_answered = self.is_answered or self.on_answer is not None
        headers.setdefault(names.id, self.sequence_id)
        if self.is_first and names.start not in headers:
            names.mark_start(headers)
        if ended := headers.get(names.end):
            slots = self.sequence.slots
            for sequence_id in (ended, *ended.split(";")):
                table.end(sequence_id.strip(), Reason.END, slots)

    # Called for the client

    def expire(self, error: ServeError) -> None:
        """Answer that the time is over; a worker that has the request continues with it."""
        self.answer(error)

    def cancel(self) -> None:
        """Stop waiting for the answer."""
        self.has_left = True
        PendingJob.cancel(self)

    def discard(self) -> None:
        """Remove the job from its sequence, if it was not sent to a worker."""
        self.sequences.table.discard(self)
