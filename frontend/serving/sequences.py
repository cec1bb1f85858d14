"""Admission to a stateful model: which sequence a request belongs to, and its way through it.

The sequence is named by a header, whatever the transport; so its first and its last request are
marked. A request without an id begins a sequence with an id of the server's making. The answer has
the id, and on the first request of a sequence also the mark, so that a client sees when what it
thought of as its sequence has begun anew.

What follows in a sequence depends on the worker, not on the client: a request whose client has
left, or whose time is over, still holds up the next one until the worker has answered it.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Job, OnAnswer
from marserve.frontend.batching.sequences.sequence_table import SequenceTable
from marserve.frontend.batching.sequences.stateful_sequence import (
    MADE_HERE,
    NoRoom,
    Reason,
    SequenceJob,
    StatefulSequence,
)
from marserve.frontend.errors import (
    BadRequest,
    SequenceOver,
    ServeError,
    WorkerDied,
    retry_after,
)
from marserve.frontend.serving.admission import Admission
from marserve.frontend.serving.predict_request import (
    OnJointAnswer,
    PendingJob,
    PendingRequests,
    PredictRequest,
    Ticket,
    group_of,
)
from marserve.frontend.serving.worker_pool import WorkerPool
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.telemetry.model_metrics import ModelMetrics

_MAX_ID_CHARACTERS = 256
_YES = "true"


class SequenceHeaders:
    """The names of the headers; see ``ts_header_key_sequence_id`` and its neighbours."""

    def __init__(self, sequence_id: str, start: str, end: str) -> None:
        self.id, self.start, self.end = sequence_id, start, end
        self._by_lower = {name.lower(): name for name in (sequence_id, start, end)}

    def read(self, headers: dict[str, str]) -> tuple[str, bool, bool]:
        """Take id and marks out of a request's headers, in any case; only a set end stays.

        Raises:
            BadRequest: The id cannot be one.
        """
        by_lower, found = self._by_lower, {}
        for key in [key for key in headers if key.lower() in by_lower]:
            found[by_lower[key.lower()]] = headers.pop(key).strip()
        sequence_id = found.get(self.id, "")
        if len(sequence_id) > _MAX_ID_CHARACTERS or not sequence_id.isprintable():
            raise BadRequest(
                f"{self.id}: the id of a sequence is a text of up to {_MAX_ID_CHARACTERS} "
                "printable characters."
            )
        ends = found.get(self.end, "").lower() == _YES
        if ends:
            headers[self.end] = _YES
        return sequence_id, found.get(self.start, "").lower() == _YES, ends


class ModelSequences:
    """The sequences of one model version, on the clock of the event loop's timers."""

    def __init__(
        self, settings: ModelSettings, names: SequenceHeaders, metrics: ModelMetrics
    ) -> None:
        self.names = names
        self.is_continuous = settings.continuous_batching
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.table = SequenceTable(
            settings.sequence_limits,
            time.monotonic,
            self._wake_at,
            lambda reason: metrics.sequence_ended(reason.value),
        )

    def close(self) -> None:
        """Nothing expires any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake_at(self, moment: float) -> None:
        self.close()
        self._timer = self._loop.call_later(moment - time.monotonic(), self.table.expire)


@dataclass(slots=True, eq=False, kw_only=True)
class PendingSequenceJob(PendingJob):
    """The job of a request to a stateful model; see `batching.sequences.SequenceJob`."""

    sequences: ModelSequences
    sequence_id: str
    starts: bool
    ends: bool
    sequence: StatefulSequence = field(init=False)
    is_first: bool = field(default=False, init=False)
    is_told: bool = field(default=False, init=False)
    has_left: bool = field(default=False, init=False)

    def begin_sequence(self) -> None:
        """See `SequenceJob.begin_sequence`."""
        self.is_first = True
        self.input.headers[self.sequences.names.start] = _YES

    # What the worker does

    def resolve(self, prediction: Prediction) -> None:
        """See `Job.resolve`; the client is answered when the worker has its next batch."""
        self._note(prediction)
        self.sequences.table.finished(self)
        asyncio.get_running_loop().call_soon(PendingJob.resolve, self, prediction)

    def push(self, piece: Prediction) -> None:
        """See `Job.push`."""
        is_first_piece = self.stream is None
        self._note(piece)
        PendingJob.push(self, piece)
        if self.sequences.is_continuous:
            if is_first_piece:
                self.sequences.table.begun(self)
            if not self.is_open:  # it is not sent for another step
                self.sequences.table.finished(self)

    def fail(self, error: ServeError) -> None:
        """See `Job.fail`."""
        if self.dispatched is not None:
            if isinstance(error, WorkerDied):
                error = SequenceOver(self.sequence_id, error.message)
            self.sequences.table.finished(self, failed=True)
        PendingJob.fail(self, error)

    def _note(self, prediction: Prediction) -> None:
        """Tell the client its sequence; end those that the handler says are over."""
        names, headers, table = self.sequences.names, prediction.headers, self.sequences.table
        self.is_told = self.is_told or self.on_answer is not None
        headers.setdefault(names.id, self.sequence_id)
        if self.is_first:
            headers.setdefault(names.start, _YES)
        if ended := headers.get(names.end):
            slots = self.sequence.slots
            for sequence_id in (ended, *ended.split(";")):
                table.end(sequence_id.strip(), Reason.END, slots)

    # What the client does

    def expire(self, error: ServeError) -> None:
        """Answer that its time is over; the worker goes on with it if it has it."""
        self.answer(error)

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        self.has_left = True
        PendingJob.cancel(self)

    def discard(self) -> None:
        """See `PendingJob.discard`."""
        self.sequences.table.discard(self)


class SequenceAdmission(Admission):
    """Accepts requests into the sequences of one model version, or refuses them."""

    def __init__(
        self,
        settings: ModelSettings,
        workers: WorkerPool,
        pending: PendingRequests,
        sequences: ModelSequences,
    ) -> None:
        super().__init__(settings, workers, pending)
        self._sequences = sequences

    @property
    def share_taken(self) -> float:
        """The share of the sequences that there may be; a new one is refused where none is free."""
        table = self._sequences.table
        return (table.open + table.waiting) / table.limits.max_sequences

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        """See `ModelVersion.submit`."""
        if request.describe:
            return super().submit(request, on_answer)
        queued, timeout = self._check(request, 1)
        sequence_id, starts, ends = self._sequences.names.read(request.input.headers)
        if not sequence_id:
            sequence_id, starts = f"{MADE_HERE}{uuid.uuid4()}", True
        request.input.headers[self._sequences.names.id] = sequence_id
        job = PendingSequenceJob(
            request.input,
            queued,
            on_answer,
            group_of(request),
            deadline=request.arrived + timeout,
            priority=request.options.priority,
            pending=self._pending,
            request_arrived=request.arrived,
            counters=self._pending.counters_of(request),
            sequences=self._sequences,
            sequence_id=sequence_id,
            starts=starts,
            ends=ends,
        )
        try:
            self._sequences.table.put(sequence_id, job)
        except NoRoom:
            self._metrics.rejected("queue_full")
            refusal = self.no_worker(by_version=request.by_version)
            refusal.retry_after = retry_after(0)  # sequences end when they like
            raise refusal from None
        except SequenceOver:
            self._metrics.rejected("sequence_over")
            raise
        self._take_in(job, (job,), request, timeout)
        return job

    def submit_all(self, requests: Sequence[PredictRequest], on_answer: OnJointAnswer) -> Ticket:
        """See `ModelVersion.submit_all`."""
        del requests, on_answer
        raise BadRequest("The model is stateful: its requests come one by one.")

    def fail_queued(self) -> None:
        """Fail all queued requests, because no worker is left to serve them."""
        self._sequences.table.fail_queued(self.refusal or self.no_worker())

    def _put(self, jobs: Sequence[Job]) -> None:
        """Have any worker describe the model; that is of no sequence."""
        accepting = [each for each in self._sequences.table.workers if each.is_accepting]
        if not accepting:
            raise self.no_worker()
        least = min(accepting, key=lambda each: len(each.open))
        least.put(cast("SequenceJob", jobs[0]))

    def _has_job_tickets(self, jobs: int) -> bool:
        """Whether job tickets are left: as many as there are places in the workers' batches."""
        return self._pending.jobs + jobs <= self._workers.ready * self._workers.batchers[0].size
