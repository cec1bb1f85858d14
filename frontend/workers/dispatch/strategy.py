"""What the dispatch strategies share: a worker's way from READY to its end.

    Batched                a batch, its reply, the next batch: what TorchServe does by default
    OutstandingBatches     the same with several batches on their way at a time
    ContinuousBatching     a request stays for as many steps as its answer takes, and others join
                           between the steps
    Async                  asynchronous handlers: every request is sent at once, and replies come in
                           any order

The supervisor makes one of them for each life of its worker. Batches do not pass through its task
but go from event to event: an idle worker asks the batcher, is given a batch (`run`), answers its
jobs when the reply comes, and asks again.

The requests of a batch come from different clients, and one must not suffer for another. A batch
that fails is split (`batching.isolation`). When a worker dies, those it held are run once more,
each alone: the one that crashes it does so twice and fails, and the others are answered. (A
coroutine that crashes late may do it three times, and take others along.) An answer that has begun
cannot be taken back: it breaks off.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from marserve.backend.protocol import Input, Predict, ProtocolError, Reply
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import WorkerDied
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.workers.connection import OnReply, WorkerConnection
from marserve.frontend.workers.failures import ResponseTimedOut

# What a worker replies that has too little memory for a batch.
OUT_OF_MEMORY = 507
# Crashes after which a request is run once more that most likely had no part in them.
_MAX_CRASHES = 2

#: Jobs that may have cost a worker its life, and those that hardly have.
InFlight = tuple[Sequence[Job], Sequence[Job]]


@dataclass(eq=False)
class DispatchStrategy(ABC):
    """See the module; to the batcher it is the worker.

    Args:
        connection: To the worker.
        batcher: Where its batches come from.
        metrics: What is counted, for its model.
        timeout: Seconds of silence after which a worker that owes a reply counts as hung; None for
            ever.
        has_workers_left: Tells whether the model has workers, or will, to run what this one gives
            back.

    Attributes:
        drained: Done when it takes no more batches and has answered what it had taken.
    """

    connection: WorkerConnection
    batcher: Batcher
    metrics: ModelMetrics
    timeout: float | None
    has_workers_left: Callable[[], bool]
    drained: "asyncio.Future[None]" = field(init=False)
    _is_stopping: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.drained = self._loop.create_future()

    @property
    def outstanding(self) -> int:
        """See `batcher.BatchRunner`."""
        return 0

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether it has taken what it has not answered yet."""

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
            self._loop.call_soon(on_reply, Reply(OUT_OF_MEMORY, str(error)))
