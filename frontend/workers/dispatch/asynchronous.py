"""The dispatch strategy for asynchronous handlers: each request is sent alone, when it arrives.

Single requests are not recorded in the history of batches.

A request whose worker died, or whose content has failed before, starts in quarantine: no other
request is sent until it is answered or has run for a moment. If the worker dies meanwhile, this
request is the cause, and those that were in flight before it are retried for the last time.

A worker is hung when it sends nothing at all. A single answer whose pieces do not continue while
other requests are answered is broken off, after one to two timeouts.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from marserve.backend.protocol import Call, Piece, Reply
from marserve.frontend.batching.batches import Batch, failure_of, release_batches
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import RequestExpired
from marserve.frontend.workers.calls import (
    CallModel,
    CallTicket,
    OnCallAnswer,
    WorkerCalls,
    no_calls,
)
from marserve.frontend.workers.connection import BatchAnswer
from marserve.frontend.workers.dispatch.batched import DispatchStrategy, InFlight

#: The default limit of requests in a worker: more than engines run at a time, but limits memory.
MAX_IN_FLIGHT = 1000
# Most crashes happen at once, and other requests must not wait for an answer that takes minutes.
_QUARANTINE_SECONDS = 1.0
# If a timer is late by more than this, in seconds, the frontend was stopped meanwhile.
_PAUSED_SECONDS = 0.1


@dataclass(eq=False)
class Async(DispatchStrategy):
    """Sends up to ``limit`` single requests to a worker at a time."""

    limit: int = field(default=MAX_IN_FLIGHT, kw_only=True)
    call_model: CallModel = no_calls
    #: The numbers of the messages, in the order of sending.
    _in_flight: dict[Job, int] = field(default_factory=dict, init=False)
    #: The latest batch, until the next one is requested.
    _latest: Batch | None = field(default=None, init=False)
    _quarantined: Job | None = field(default=None, init=False)
    #: Jobs whose answer has begun, and has had neither a piece nor a call since the last check.
    _silent: set[Job] = field(default_factory=set, init=False)
    _next_check: asyncio.TimerHandle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._calls = WorkerCalls(self._call, self.connection.reply_to_call)
        self._calls.on_job_end = self._on_job_end
        self.connection.calls = self._calls
        self.connection.waits_for_reader = self._waits_for_reader

    def to_saturate(self, _size: int) -> int:
        """Return the limit."""
        return self.limit

    @property
    def free_capacity(self) -> int:
        """The number of requests that the worker accepts now."""
        return 0 if self._is_stopping else self.limit - len(self._in_flight)

    def run(self, batch: Batch) -> None:
        """Send each job to the worker."""
        self._latest = batch
        batch.worker_id = self.worker_id
        self._count_suspected(batch)
        for job in batch.jobs:
            self._in_flight[job] = 0  # in flight even if sending raises
            single = job.batch = Batch([job], batch.closed, batch.reason, worker_id=self.worker_id)
            on_reply = partial(self._on_reply, single)
            number = self._in_flight[job] = self._send([job.input], on_reply, caller=job)
            if self.connection.is_cancellable:
                job.notify_end(partial(self._on_job_end, number))
        if batch.jobs[0].crashes or batch.jobs[0].is_suspected:
            self._quarantined = job = batch.jobs[0]
            self._loop.call_later(_QUARANTINE_SECONDS, self._end_quarantine, job)
        else:
            # Not at once: with a long queue the calls would be nested too deep.
            self._loop.call_soon(self._ask_for_more)

    def _on_job_end(self, number: int) -> None:
        self._calls.end(number)
        if self.connection.is_cancellable:
            self.connection.cancel(number)

    def _end_quarantine(self, job: Job) -> None:
        if job is self._quarantined:
            self._quarantined = None
            self._ask_for_more()

    def _ask_for_more(self) -> None:
        if self._latest and not self._quarantined and len(self._in_flight) < self.limit:
            latest, self._latest = self._latest, None
            self._ask(latest)

    def _on_reply(self, batch: Batch, reply: BatchAnswer) -> None:
        self._silent.discard(batch.jobs[0])
        if isinstance(reply, Piece):
            batch.push(reply, partial(self.connection.report_read, reply.number))
            if self._next_check is None and self.timeout is not None:
                self._next_check = self._loop.call_later(self.timeout, self._check_streams)
        if not isinstance(reply, Reply):
            return
        (job,) = batch.jobs
        batch.ran(reply)
        self._calls.end(reply.number)  # the handler does not wait for them any more
        if reply.code == 200:
            queued, took = batch.closed - job.arrived, time.monotonic() - batch.closed
            self.metrics.batch_done(batch.ids, 1, queued, took, reply, example=job.input.id)
            batch.deliver(reply.predictions)
            if job.is_suspected:
                self.batcher.isolation.contents.discard(job)
        else:
            self.metrics.reported(reply.metrics)
            is_cancelled = self.connection.is_cancellable and not job.is_open
            batch.fail(failure_of(reply))
            if not is_cancelled:
                self.metrics.failed_batches.update(1)
        batch.release()
        del self._in_flight[job]  # last: after an exception the job is still in flight
        self._end_quarantine(job)
        self._ask_for_more()
        self._note_drained()

    def _call(self, caller: Job, call: Call, on_answer: OnCallAnswer) -> CallTicket:
        self._silent.discard(caller)
        return self.call_model(caller, call, on_answer)

    def _check_streams(self) -> None:
        """Break off answers that have not continued since the last check, one timeout ago."""
        assert self._next_check is not None
        is_late = self._loop.time() - self._next_check.when() > _PAUSED_SECONDS
        self._next_check = None
        streaming = [job for job in self._in_flight if job.stream is not None and job.is_open]
        due = {job for job in streaming if not self._may_wait(job)}
        if not is_late:  # else a piece may be unread
            for job in self._silent & due:
                self.metrics.failed_batches.update(1)
                why = f"The handler has sent nothing for responseTimeout ({self.timeout:g} s)."
                job.fail(RequestExpired(why))
        self._silent = due
        if streaming and self.timeout is not None:
            self._next_check = self._loop.call_later(self.timeout, self._check_streams)

    def _may_wait(self, job: Job) -> bool:
        """Return whether the handler may wait for the client or a call, which have deadlines."""
        return self._is_unread(job) or self._calls.waits_for(self._in_flight[job])

    def _waits_for_reader(self) -> bool:
        return any(map(self._is_unread, self._in_flight))

    def _is_unread(self, job: Job) -> bool:
        return job.stream is not None and job.stream.unread_bytes > self.connection.stream_window

    def _batches_in_flight(self) -> Iterable[Batch]:
        return (self._latest,) if self._latest is not None else ()

    def _take_in_flight(self) -> InFlight:
        jobs, self._in_flight = list(self._in_flight), {}
        release_batches(jobs)
        self._silent.clear()
        if self._next_check is not None:
            self._next_check.cancel()
            self._next_check = None
        quarantined, self._quarantined = self._quarantined, None
        if quarantined is None:
            return jobs, ()
        return [quarantined], [job for job in jobs if job is not quarantined]
