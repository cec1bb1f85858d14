"""How a worker that is READY is given its batches: what strategies share, and the default one.

    Batched                a batch, its reply, the next batch: what TorchServe does by default
    OutstandingBatches     the same with several batches on their way at a time
    ContinuousBatching     a request stays for as many steps as its answer takes, and others join
                           between the steps
    Async                  asynchronous handlers: every request is sent at once, and replies come in
                           any order

The supervisor makes one of them for each life of its worker. It asks the batcher when the worker is
idle, is given a batch (`run`), answers its jobs when the reply comes, and asks again.

The requests of a batch come from different clients, and one must not suffer for another. A batch
that fails is split (`batching.isolation`). When a worker dies, those it held are run once more,
each alone: the one that crashes it does so twice and fails, and the others are answered. (A
coroutine that crashes late may do it three times.) An answer that has begun breaks off.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial

from marserve.backend.protocol import Input, Predict, ProtocolError, Reply
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch, Reason, failure_of
from marserve.frontend.batching.isolation import BatchSplitting, RetryBudget
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import WorkerDied
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.workers.connection import OnReply, WorkerConnection
from marserve.frontend.workers.failures import ResponseTimedOut

# What a worker replies that has too little memory for a batch.
OUT_OF_MEMORY = 507
# Crashes after which a request is run once more that most likely had no part in them.
_MAX_CRASHES = 2
# Why a batch is a part of one that failed.
_PARTS = (Reason.ISOLATION, Reason.OUT_OF_MEMORY)

#: Jobs that may have cost a worker its life, and those that hardly have.
InFlight = tuple[Sequence[Job], Sequence[Job]]


@dataclass(eq=False)
class DispatchStrategy(ABC):
    """Serves one life of a worker; to the batcher it is the worker.

    Attributes:
        timeout: Seconds of silence after which a worker that owes a reply counts as hung; None for
            ever.
        has_workers_left: Tells whether the model has workers, or will, to run what this one gives
            back.
        drained: Done when it takes no more batches and has answered what it had taken.
    """

    connection: WorkerConnection
    batcher: Batcher
    metrics: ModelMetrics
    timeout: float | None
    has_workers_left: Callable[[], bool]
    drained: "asyncio.Future[None]" = field(init=False)
    _is_stopping: bool = field(default=False, init=False)
    _is_lost: bool = field(default=False, init=False)
    #: What it has taken and not answered yet.
    _in_flight: Sized = field(init=False)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.drained = self._loop.create_future()

    @property
    def outstanding(self) -> int:
        """See `batcher.BatchRunner`."""
        return 0

    @property
    def is_busy(self) -> bool:
        """Whether it has taken what it has not answered yet."""
        return bool(self._in_flight)

    @abstractmethod
    def run(self, batch: Batch) -> None:
        """See `batcher.BatchRunner`."""

    @abstractmethod
    def _batches_in_flight(self) -> Iterable[Batch]:
        """Those that the batcher counts as this worker's."""

    @abstractmethod
    def _take_in_flight(self) -> InFlight:
        """Forget what was taken and is not answered yet, and return it."""

    def start(self) -> None:
        """Ask for the first batch."""
        self._ask()

    def stop_accepting(self) -> None:
        """Ask for nothing more; what was taken goes on. Safe to call twice."""
        self._is_stopping = True
        self.batcher.remove(self, self._batches_in_flight())
        self._note_drained()

    def on_connection_lost(self, cause: str) -> None:
        """The worker has gone: what it had taken is run by another, or fails for this cause."""
        self._is_lost = True
        self.stop_accepting()
        suspected, others = self._take_in_flight()
        again = self._to_retry(suspected, others)
        for job in {*suspected, *others}.difference(again):
            job.fail(WorkerDied(cause))
        if suspected:
            self.metrics.batch_failed()
        if again:
            self.metrics.jobs_retried(len(again))
            self.batcher.requeue(again)
        self._note_drained()

    def _to_retry(self, suspected: Sequence[Job], others: Sequence[Job]) -> list[Job]:
        """Whom another worker runs: of the suspected, whoever has not been in a crash before."""
        lost = self.connection.lost
        if not lost.done() or not self.has_workers_left():  # not lost, but stopped by us
            return []
        # A single job over which a worker hung is to blame: it need not hang twice.
        is_found = len(suspected) == 1 and isinstance(lost.result(), ResponseTimedOut)
        if is_found or not self.batcher.batching.retries:
            suspected = ()
        again = [job for job in suspected if not job.crashes]
        again += [job for job in others if job.crashes < _MAX_CRASHES]
        again = [job for job in again if job.is_open and job.stream is None]
        for job in again:
            job.crashes += 1
        return again

    def _ask(self, done: Batch | None = None) -> None:
        """Ask for the next batch when ``done`` with one; or be drained."""
        if self._is_stopping:
            self._note_drained()
        else:
            self.batcher.mark_idle(self, done)

    def _note_drained(self) -> None:
        if self._is_stopping and not self.is_busy and not self.drained.done():
            self.drained.set_result(None)

    def _send(self, inputs: list[Input], on_reply: OnReply, run_as: int = 0) -> None:
        try:
            self.connection.predict(Predict(inputs, run_as=run_as), self.timeout, on_reply)
        except ProtocolError as error:
            # Later: it asks for the next batch, which may be no better, and so on.
            self._loop.call_soon(self._refuse, on_reply, str(error))

    def _refuse(self, on_reply: OnReply, why: str) -> None:
        if not self._is_lost:  # else those in flight are answered already
            on_reply(Reply(OUT_OF_MEMORY, why))


@dataclass(eq=False)
class Batched(DispatchStrategy):
    """A batch, its reply, the next batch; one that failed is split before another is asked for.

    Attributes:
        budget: What the model may spend on splitting batches that failed.
    """

    budget: RetryBudget
    #: What was sent and not answered, in that order; for a part of a batch that failed, how that is
    #: being split.
    _in_flight: dict[Batch, BatchSplitting | None] = field(default_factory=dict, init=False)

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
