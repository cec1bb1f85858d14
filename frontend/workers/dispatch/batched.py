"""Dispatch strategies, which send batches to a ready worker: the base class, and the default one.

The requests of a batch come from different clients and must not affect each other. A batch that
fails is split (`batching.isolation.splitting`). When a worker dies, each of its requests is retried
alone: one that crashes the worker does so again and fails, the others are answered. (A coroutine
that crashes late may do it three times.) The content of a request that crashed is remembered: the
same content runs alone, and once. An answer that is being streamed is broken off.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, overload

from marserve.backend.protocol import (
    Compare,
    Compared,
    Input,
    Piece,
    Predict,
    Profile,
    Profiled,
    ProtocolError,
    Reply,
)
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch, Reason, failure_of
from marserve.frontend.batching.isolation.splitting import BatchSplitting, Failure, Hint
from marserve.frontend.batching.jobs import Job
from marserve.frontend.batching.rows import in_blocks
from marserve.frontend.errors import WorkerDied
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.workers.connection import BatchAnswer, OnReply, WorkerConnection
from marserve.frontend.workers.failures import ResponseTimedOut

# The code of a worker's reply when a batch ran out of memory.
OUT_OF_MEMORY = 507
# The number of crashes after which a request that is probably not the cause is still retried.
_MAX_CRASHES = 2
# How often it is looked whether a worker that runs samples has ended.
_POLL_SECONDS = 0.5
# The reasons of batches that are parts of a failed one.
_PARTS = (Reason.ISOLATION, Reason.OUT_OF_MEMORY)

#: Jobs in flight when a worker died: those that may have caused it, and the others.
InFlight = tuple[Sequence[Job], Sequence[Job]]


@dataclass(eq=False)
class DispatchStrategy(ABC):
    """Sends batches to one worker process; a `batcher.BatchRunner`."""

    connection: WorkerConnection
    batcher: Batcher
    metrics: ModelMetrics
    #: Seconds without a due reply after which a worker counts as hung; None for no limit.
    timeout: float | None
    #: Whether the model has other workers, or will have, to retry jobs.
    has_workers_left: Callable[[], bool]
    #: Whether adjacent rows of tensors are sent, and answered, as one.
    joins_rows: ClassVar[bool] = False
    #: The maximum number of batches, or of single requests, that are in flight.
    limit: int = field(default=1, kw_only=True)
    worker_id: int = field(default=0, kw_only=True)
    #: Done when no more batches are accepted and all jobs are answered.
    drained: "asyncio.Future[None]" = field(init=False)
    _is_stopping: bool = field(default=False, init=False)
    _is_lost: bool = field(default=False, init=False)
    #: The jobs or batches that were sent and are not answered yet.
    _in_flight: Sized = field(init=False)
    #: The number of other messages that are not answered yet.
    _control_messages: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.drained = self._loop.create_future()

    @property
    def outstanding(self) -> int:
        """The number of batches that make the worker less preferred than an idle one."""
        return 0

    @property
    def free_capacity(self) -> int:
        """The number of requests that the worker accepts now; 0 if it is not known."""
        return 0

    def to_saturate(self, size: int) -> int:
        """Return how many requests in flight keep the worker busy with batches of this size.

        One batch is filled while another runs: clients need a moment for their next request.
        """
        return 2 * size

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._in_flight or self._control_messages)

    @property
    def is_accepting(self) -> bool:
        """Whether it sends further batches."""
        return not self._is_stopping

    @abstractmethod
    def run(self, batch: Batch) -> None:
        """Send a batch to the worker; returns at once and never raises."""

    def _count_suspected(self, batch: Batch) -> None:
        if batch.reason is Reason.SUSPECTED:
            self.metrics.suspected_requests.update(1)

    @abstractmethod
    def _batches_in_flight(self) -> Iterable[Batch]:
        """Batches that the batcher counts for this worker."""

    @abstractmethod
    def _take_in_flight(self) -> InFlight:
        """Remove and return the jobs in flight."""

    def start(self) -> None:
        """Request the first batch."""
        self._ask()

    def finish(self) -> None:
        """Stop when everything that was accepted for this worker is answered."""
        self.stop_accepting()

    def stop_accepting(self) -> None:
        """Request no more batches; those in flight continue. Safe to call twice."""
        self._is_stopping = True
        self.batcher.remove(self, self._batches_in_flight())
        self._note_drained()

    def on_connection_lost(self, cause: str) -> None:
        """Retry the jobs in flight in another worker, or fail them with this cause."""
        self._is_lost = True
        self._control_messages = 0
        self.stop_accepting()
        suspected, others = self._take_in_flight()
        again = self._to_retry(suspected, others)
        for job in {*suspected, *others}.difference(again):
            job.fail(WorkerDied(cause))
        if suspected:
            self.metrics.failed_batches.update(1)
        if again:
            self.metrics.retried_requests.update(len(again))
            self.batcher.requeue(again)
        self._note_drained()

    def _to_retry(self, suspected: Sequence[Job], others: Sequence[Job]) -> list[Job]:
        """Return the jobs to retry; suspected ones only after their first crash."""
        lost = self.connection.lost
        if not lost.done() or not self.has_workers_left():  # it was stopped, or no worker is left
            return []
        # A single job over which the worker hung is the cause, and is not retried.
        is_found = len(suspected) == 1 and isinstance(lost.result(), ResponseTimedOut)
        is_known = len(suspected) == 1 and self._is_known_to_crash(suspected[0])
        if is_found or is_known:
            self.batcher.isolation.remember(suspected[0], crashes=True)
        if is_found or is_known or not self.batcher.batching.retries:
            suspected = ()
        again = [job for job in suspected if not job.crashes]
        again += [job for job in others if is_known or job.crashes < _MAX_CRASHES]
        again = [job for job in dict.fromkeys(again) if job.is_open and job.stream is None]
        for job in again:
            job.crashes += not is_known
        return again

    def _is_known_to_crash(self, job: Job) -> bool:
        # It was in a crash before, or its content crashed a worker alone.
        return bool(job.crashes) or self.batcher.isolation.contents.has_crashed(job)

    def _ask(self, done: Batch | None = None) -> None:
        if self._is_stopping:
            self._note_drained()
        else:
            self.batcher.mark_idle(self, done)

    def _note_drained(self) -> None:
        if self._is_stopping and not self.is_busy and not self.drained.done():
            self.drained.set_result(None)

    def _send(
        self,
        inputs: list[Input],
        on_reply: OnReply,
        run_as: int = 0,
        caller: Job | None = None,
    ) -> int:
        """Send one message; return its number, 0 if it is too large to be sent."""
        rows: Sequence[int] = ()
        if self.batcher.has_rows:
            inputs, rows = in_blocks(inputs, joined=self.joins_rows)
        predict = Predict(inputs, 0, run_as, rows)
        try:
            self.connection.predict(predict, self.timeout, on_reply, caller)
        except ProtocolError as error:
            # Not at once: `_refuse` requests the next batch, which may fail too, and so on.
            self._loop.call_soon(self._refuse, on_reply, str(error))
            return 0
        return predict.number

    def _refuse(self, on_reply: OnReply, why: str) -> None:
        if not self._is_lost:  # else the jobs are answered already
            on_reply(Reply(OUT_OF_MEMORY, why))


@dataclass(eq=False)
class Batched(DispatchStrategy):
    """Sends one batch at a time; one that failed is split before the next is requested."""

    joins_rows: ClassVar[bool] = True
    #: Whether batches of samples can be measured between those of requests.
    can_profile: ClassVar[bool] = True
    #: Batches sent and not answered, in order; for a part of a failed batch, its splitting.
    _in_flight: dict[Batch, BatchSplitting | None] = field(default_factory=dict, init=False)

    #: Sends samples when the batch in flight is answered.
    _samples: Callable[[], None] | None = field(default=None, init=False)

    def run_samples(
        self,
        message: Profile | Compare,
        seconds: float,
        on_reply: Callable[[Any], None],
    ) -> None:
        """Make the worker run a batch of samples, which probably takes ``seconds``.

        A busy worker does so after its batch. ``on_reply`` is not called if it stops before.
        """
        self._samples = partial(self._send_samples, message, seconds, on_reply)
        if self in self.batcher.workers.waiting:
            self._ask()

    def _ask(self, done: Batch | None = None) -> None:
        if self._is_stopping:
            self._note_drained()
        elif self._samples is None:
            self.batcher.mark_idle(self, done)
        else:
            send, self._samples = self._samples, None
            send()
            if done is not None:
                self.batcher.mark_done(done)

    def _send_samples(
        self, message: Profile | Compare, seconds: float, on_reply: Callable[[Any], None]
    ) -> None:
        self._control_messages += 1
        self.batcher.lend(self, seconds)
        self.connection.request(message, self.timeout, partial(self._on_samples, on_reply))

    def _on_samples(self, on_reply: Callable[[Any], None], reply: Profiled | Compared) -> None:
        self._control_messages -= 1
        if self._is_stopping:
            self._note_drained()
        else:
            self.batcher.take_back(self)
            if self._samples is not None and self in self.batcher.workers.waiting:
                self._ask()
        on_reply(reply)

    def run(self, batch: Batch) -> None:
        """Send a batch to the worker."""
        if self.batcher.isolation.is_alert:
            self._count_suspected(batch)
        self._run(batch, None)

    def _run(self, batch: Batch, splitting: BatchSplitting | None) -> None:
        self._in_flight[batch] = splitting
        batch.worker_id = self.worker_id
        self._send(batch.inputs, partial(self._on_reply, batch), batch.run_as)

    def _on_reply(self, batch: Batch, reply: BatchAnswer) -> None:
        if isinstance(reply, Piece):
            batch.push(reply)
        if not isinstance(reply, Reply):  # `NextBatch` is ignored: one batch is sent at a time
            return
        splitting = self._in_flight.pop(batch)
        batch.ran(reply)
        took = time.monotonic() - batch.closed - reply.length_seconds
        try:
            self._finish(batch, splitting, took, reply)
        except BaseException:
            self._in_flight[batch] = splitting  # this ends the connection, which fails its jobs
            raise

    def _finish(
        self, batch: Batch, splitting: BatchSplitting | None, took: float, reply: Reply
    ) -> None:
        succeeded = reply.code == 200
        self.batcher.record(batch, took, succeeded=succeeded)
        if splitting is not None or not succeeded:
            self._split(batch, splitting, reply)
        else:
            self._ask(batch)
        # Last: the worker runs its next batch while answers are written.
        if succeeded:
            self._count(batch, took, reply)
            batch.deliver(reply.predictions)
        else:
            self.metrics.failed_batches.update(1)
        batch.release()

    def _count(self, batch: Batch, took: float, reply: Reply) -> None:
        if reply.lengths and self.batcher.learn_lengths(batch, reply.lengths):
            self.metrics.input_length_failed()
        queued = batch.closed - batch.jobs[-1].arrived
        example = batch.jobs[0].input.id
        self.metrics.batch_done(
            batch.ids, len(batch), queued, took, reply, held=batch.held, example=example
        )

    def _split(self, batch: Batch, splitting: BatchSplitting | None, reply: Reply) -> None:
        """Run the next part of a failed batch; request a new batch when all parts are answered."""
        isolation, batching = self.batcher.isolation, self.batcher.batching
        if splitting is None:
            splitting = BatchSplitting(
                len(batch), isolation, self.metrics.reported, isolates=batching.isolates
            )
        if reply.code == 200:
            splitting.succeeded()
        else:
            is_memory = reply.code == OUT_OF_MEMORY
            reason = Reason.OUT_OF_MEMORY if is_memory else Reason.ISOLATION
            is_shared = batching.isolates and batching.max_size > 1
            if len(batch) == 1 and is_shared and not is_memory:
                isolation.request_failed(batch.jobs[0], batch.reason)
            hint = hint_of(reply, batch)
            failure = Failure(failure_of(reply), reply.metrics)
            splitting.failed(batch.jobs, failure, reason, batch.run_as, hint)
        part = splitting.next_part()
        if part is None:
            if splitting.too_large:
                self.batcher.out_of_memory(splitting.too_large)
            if splitting.fails_together:
                self.batcher.failed_together(splitting.fails_together)
            self.batcher.note_failures()
            self._ask(batch)
            return
        if splitting.runs == 1:
            self.metrics.isolated_batches.update(1)
        run_as = self.batcher.batching.run_as(len(part.jobs))
        predicted = self.batcher.costs.mean(run_as)
        half = Batch(part.jobs, time.monotonic(), part.reason, run_as, predicted)
        for job in half.jobs:
            job.batch = half
        self.batcher.workers.replace(batch, half)
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
            batch.release()
        return suspected, others

    def _blamed(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return those that may have caused the worker's death."""
        return batches


@overload
async def samples_run(worker: Batched, message: Profile, expected: float) -> Profiled | None: ...
@overload
async def samples_run(worker: Batched, message: Compare, expected: float) -> Compared | None: ...
async def samples_run(
    worker: Batched, message: Profile | Compare, expected: float
) -> Profiled | Compared | None:
    """Return the result of a run, which takes about ``expected`` seconds; None if it is lost."""
    reply: asyncio.Future[Profiled | Compared] = asyncio.get_running_loop().create_future()
    worker.run_samples(message, expected, reply.set_result)
    while not reply.done():
        await asyncio.wait({reply}, timeout=_POLL_SECONDS)
        if not (reply.done() or worker.is_accepting):
            return None
    return reply.result()


def hint_of(reply: Reply, batch: Batch) -> Hint | None:
    """Return the cause of a failure by the handler's traceback; None if it is unknown."""
    if not 0 <= reply.suspect < len(batch):
        return None
    return Hint(batch.jobs[reply.suspect], reply.raised_at)
