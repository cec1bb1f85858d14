"""Admission to a stateful model: reads which sequence a request belongs to, and queues it there.

A header names the sequence, for every transport; its first and last requests are marked. A
request without an id begins a sequence with an id that the server makes. The answer contains the
id, and on the first request of a sequence also the mark: so a client detects a restart.
"""

import uuid
from collections.abc import Sequence
from typing import cast

from marserve.frontend.batching.jobs import Job, OnAnswer
from marserve.frontend.batching.sequences.stateful_sequence import (
    MADE_HERE,
    SequenceJob,
    SequencesFull,
)
from marserve.frontend.errors import BadRequest, SequenceOver, ServeError, retry_after
from marserve.frontend.serving.admission import Admission
from marserve.frontend.serving.predict_request import (
    OnJointAnswer,
    PredictRequest,
    Ticket,
    group_of,
)
from marserve.frontend.serving.request_rows import Rows
from marserve.frontend.serving.stateful.sequence_jobs import PendingSequenceJob
from marserve.frontend.serving.stateful.stateful_workers import StatefulWorkerPool


class StatefulAdmission(Admission):
    """Accepts requests into the sequences of one model version, or refuses them."""

    _workers: StatefulWorkerPool

    @property
    def share_taken(self) -> float:
        """The share of the allowed sequences that are open or wait; at 1 new ones are refused."""
        table = self._workers.sequences.table
        return (table.open + table.waiting) / table.limits.max_sequences

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        """Queue a request in its sequence, or refuse it."""
        if request.describe:
            return super().submit(request, on_answer)
        queued, timeout = self._check(request)
        sequences = self._workers.sequences
        sequence_id, starts, ends = sequences.names.read(request.input.headers)
        if not sequence_id:
            sequence_id, starts = f"{MADE_HERE}{uuid.uuid4()}", True
        request.input.headers[sequences.names.id] = sequence_id
        job = PendingSequenceJob(
            request.input,
            queued,
            on_answer,
            group_of(request, request.input),
            deadline=request.arrived + timeout,
            priority=request.options.priority,
            pending=self._pending,
            request_arrived=request.arrived,
            counters=self._pending.counters_of(request),
            nested_in=request.nested_in,
            trace=request.trace,
            sequences=sequences,
            sequence_id=sequence_id,
            starts=starts,
            ends=ends,
        )
        try:
            sequences.table.put(sequence_id, job)
        except SequencesFull as error:
            raise self._without_slot(request, str(error)) from None
        except SequenceOver as error:
            self._refused(request, error, "sequence_over")
            raise
        self._pending.jobs += 1
        self._take_in(job, queued, request, timeout)
        return job

    def _without_slot(self, request: PredictRequest, why: str) -> ServeError:
        error = self._full(self.no_worker(by_version=request.by_version), why)
        error.retry_after = retry_after(0)  # it is not known when a sequence ends
        return self._refused(request, error, "queue_full")

    def submit_all(self, request: PredictRequest, rows: Rows, on_answer: OnJointAnswer) -> Ticket:
        """Refuse rows of one request, which would belong to one sequence."""
        del request, rows, on_answer
        raise BadRequest("The model is stateful: its requests come one by one.")

    def fail_queued(self) -> None:
        """Fail all queued requests, because no worker is left to serve them."""
        self._workers.sequences.table.fail_queued((self.refusal or self.no_worker)())

    def _put(self, jobs: Sequence[Job], request: PredictRequest, behind: int = 0) -> None:
        """Send a describe request, which has no sequence, to the worker with the fewest."""
        del request, behind
        accepting = [each for each in self._workers.sequences.table.workers if each.is_accepting]
        if not accepting:
            raise self.no_worker()
        least = min(accepting, key=lambda each: len(each.open))
        least.put(cast("SequenceJob", jobs[0]))

    def _has_job_tickets(self, jobs: int) -> bool:
        """Whether job tickets are left: one for each row of the workers' batches."""
        return self._pending.jobs + jobs <= self._workers.ready * self._workers.batchers[0].size
