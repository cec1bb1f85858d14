"""How a READY worker serves: which batches it asks for, and what becomes of their replies.

    OneAtATime    a batch, its reply, the next batch: what TorchServe does by default
    InSteps       continuous batching: a request stays for as many steps as its answer takes, and
                  others join between the steps
    Concurrent    asynchronous handlers: every request is sent at once, replies come in any order

and in `workers.outstanding`

    SeveralAtATime   several batches of OneAtATime outstanding

The supervisor makes one of these for each life of its worker. Batches pass by the supervisor's
task, from event to event: an idle worker enlists with the batcher, is given a batch (`run`),
answers its jobs when the reply comes, and enlists again.

Batch-mates are strangers, and one must not suffer for another. A batch that fails is taken apart
(`batching.isolation`). When a worker dies, those it held are run once more, each by itself: whoever
crashes it does that twice and fails, and the others are answered. (A coroutine that does it late
may do it three times, and take others along.) An answer that has begun cannot be taken back: it
breaks off.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from marserve.backend.protocol import (
    STREAM_NEXT,
    Input,
    Predict,
    Prediction,
    ProtocolError,
    Reply,
)
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.batching.isolation import Bisection, RetryBudget
from marserve.frontend.batching.jobs import Group, Job
from marserve.frontend.errors import PredictionFailed, ServeError, WorkerDied
from marserve.frontend.telemetry.metrics import ModelMetrics
from marserve.frontend.workers.connection import OnReply, WorkerConnection
from marserve.frontend.workers.errors import ResponseTimedOut

# What a worker replies that has too little memory for a batch.
_OUT_OF_MEMORY = 507
# Why a batch is a part of one that failed.
_PARTS = (Reason.ISOLATION, Reason.OUT_OF_MEMORY)
# How long a coroutine whose worker died has the next one to itself. What crashes a process mostly
# does so at once; and others must not wait for the end of an answer that takes minutes.
_PROBATION_SECONDS = 1.0
# Crashes after which a request is run once more that most likely had no part in them.
_MOST_CRASHES = 2


@dataclass(eq=False)
class Serving(ABC):
    """What a worker does from READY to its end.

    Args:
        connection: To the worker.
        batcher: Where its batches come from.
        metrics: What is counted, for its model.
        timeout: Seconds of silence after which a worker that owes a reply counts as hung; None for
            ever.
        is_anyone_left: Tells whether the model has workers, or will, to run what this one gives
            back.
    """

    connection: WorkerConnection
    batcher: Batcher
    metrics: ModelMetrics
    timeout: float | None
    is_anyone_left: Callable[[], bool]
    #: Done when it rests and has answered what it had taken.
    idle: "asyncio.Future[None]" = field(init=False)
    _resting: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.idle = self._loop.create_future()

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether it has taken what it has not answered yet."""

    @abstractmethod
    def begin(self) -> None:
        """Ask for the first batch."""

    @abstractmethod
    def _withdraw(self) -> None:
        """Take back what was asked for."""

    @abstractmethod
    def _abandon(self) -> tuple[Sequence[Job], Sequence[Job]]:
        """Forget what is in hand.

        Returns:
            The jobs that may have cost the worker its life, and those that hardly have.
        """

    def rest(self) -> None:
        """Ask for nothing more; what is in hand goes on. Safe to call twice."""
        self._resting = True
        self._withdraw()
        self._note_idle()

    def lose(self, cause: str) -> None:
        """The worker has gone: what is in hand is run by another, or fails.

        Args:
            cause: Why it has gone, a sentence for the clients.
        """
        self.rest()
        held, others = self._abandon()
        again = self._to_run_again(held, others)
        for job in {*held, *others}.difference(again):
            job.fail(WorkerDied(cause))
        if held:
            self.metrics.batch_failed()
        if again:
            self.metrics.jobs_retried(len(again))
            self.batcher.bring_back(again)
        self._note_idle()

    def _to_run_again(self, held: Sequence[Job], others: Sequence[Job]) -> list[Job]:
        """Whom another worker runs: of those held, whoever has not been in a crash before."""
        lost = self.connection.lost
        if not lost.done() or not self.is_anyone_left():  # not lost, but stopped by us
            return []
        # Of a worker that hung over a single job, the job is to blame: it need not hang twice.
        is_found = len(held) == 1 and isinstance(lost.result(), ResponseTimedOut)
        if is_found or not self.batcher.batching.retries:
            held = ()
        again = [job for job in held if not job.crashes]
        again += [job for job in others if job.crashes < _MOST_CRASHES]
        again = [job for job in again if job.is_open and job.stream is None]
        for job in again:
            job.crashes += 1
        return again

    def _note_idle(self) -> None:
        if not self.is_busy and not self.idle.done():
            self.idle.set_result(None)

    def _send(self, inputs: list[Input], on_reply: OnReply, run_as: int = 0) -> None:
        on_reply = partial(self.metrics.with_reply, on_reply)
        try:
            self.connection.predict(Predict(inputs, run_as=run_as), self.timeout, on_reply)
        except ProtocolError as error:
            # Later: it asks for the next batch, which may be no better, and so on.
            self._loop.call_soon(on_reply, Reply(_OUT_OF_MEMORY, str(error)))


class Runner(Serving):
    """A way of serving that is given its batches itself.

    Attributes:
        in_hand: See `batcher.BatchRunner`.
    """

    in_hand = 0

    def begin(self) -> None:
        """See `Serving.begin`."""
        self.batcher.enlist(self)

    @abstractmethod
    def run(self, batch: Batch) -> None:
        """Called by the batcher with the batch this worker asked for."""

    def _withdraw(self) -> None:
        self.batcher.withdraw(self)

    def _go_on(self) -> None:
        """Ask for the next batch, or be done."""
        if self._resting:
            self._note_idle()
        else:
            self.batcher.enlist(self)


@dataclass(eq=False)
class OneAtATime(Runner):
    """One batch in flight at most; one that failed is dealt with before another is asked for.

    Args:
        budget: What the model may spend on that.
    """

    budget: RetryBudget
    _batch: Batch | None = field(default=None, init=False)
    _bisection: Bisection | None = field(default=None, init=False)

    @property
    def is_busy(self) -> bool:
        """See `Serving.is_busy`."""
        return self._batch is not None

    def run(self, batch: Batch) -> None:
        """See `Runner.run`."""
        self._batch = batch
        self._send(batch.inputs, partial(self._on_reply, batch), batch.run_as)

    def _on_reply(self, batch: Batch, reply: Reply) -> None:
        if reply.more:
            _push(batch, reply)
            return
        if self._batch is not batch:  # lost while the refusal to send it was on its way
            return
        self._batch = None
        took = time.monotonic() - batch.closed
        succeeded = reply.code == 200
        self.batcher.finished(batch, took, succeeded=succeeded)
        if self._bisection is not None:
            self._part_done(self._bisection, batch, took, reply)
        else:
            self.budget.earn(took)
            if not succeeded:
                self._take_apart(batch, reply)
        if self._batch is None:
            self._go_on()
        # The worker has its next batch already: it need not wait while these answers are written.
        if succeeded:
            batch.deliver(reply.predictions)
            self._count(batch, took, reply)
        else:
            self.metrics.batch_failed()

    def _count(self, batch: Batch, took: float, reply: Reply) -> None:
        # Parts of a batch have not waited in the line, at least not for that.
        waited = batch.waited if batch.reason not in _PARTS else None
        queued = batch.closed - batch.jobs[-1].arrived
        self.metrics.batch_done(
            _ids(batch), len(batch), queued, took, reply, waited=waited, held=batch.held
        )

    def _take_apart(self, batch: Batch, reply: Reply) -> None:
        """Begin to find out who is to blame for a failure; a single job is."""
        if len(batch) == 1:
            batch.fail(_failure(reply))
            return
        isolates = self.batcher.batching.isolates and self.budget.has_credit
        bisection = self._bisection = Bisection(len(batch), isolates=isolates)
        bisection.failed(batch.jobs, _failure(reply), _reason_to_halve(reply), batch.run_as)
        self._run_next_part(bisection)

    def _part_done(self, bisection: Bisection, part: Batch, took: float, reply: Reply) -> None:
        if part.reason is Reason.ISOLATION:
            self.budget.spend(took)
        if reply.code == 200:
            bisection.succeeded()
        else:
            bisection.failed(part.jobs, _failure(reply), _reason_to_halve(reply), part.run_as)
        self._run_next_part(bisection)

    def _run_next_part(self, bisection: Bisection) -> None:
        part = bisection.next()
        if part is None:
            self._bisection = None
            if bisection.too_large:
                self.batcher.out_of_memory(bisection.too_large)
            return
        if bisection.runs == 1:
            self.metrics.batch_isolated()
        run_as = self.batcher.batching.run_as(len(part.jobs))
        predicted = self.batcher.costs.mean(run_as)
        batch = Batch(part.jobs, time.monotonic(), part.reason, run_as, predicted)
        self.batcher.goes_on(self, batch)
        self.run(batch)

    def _abandon(self) -> tuple[Sequence[Job], Sequence[Job]]:
        batch, self._batch = self._batch, None
        bisection, self._bisection = self._bisection, None
        if batch is None:
            return (), ()
        self.batcher.finished(batch, time.monotonic() - batch.closed, succeeded=False)
        return batch.jobs, bisection.waiting if bisection is not None else ()


@dataclass(eq=False)
class InSteps(Runner):
    """Continuous batching: the requests under way are sent again, step by step.

    A request's header ``ts_stream_next: true`` in a step says that its answer goes on; its input
    is sent with the first step only. Clients that have left are left out of the next step.

    A step that fails fails all in it: what the handler keeps of those under way is not ours to take
    apart. Steps are no batches of a policy, and stand neither in its history nor in its costs.
    """

    _jobs: list[Job] = field(default_factory=list, init=False)

    @property
    def is_busy(self) -> bool:
        """See `Serving.is_busy`."""
        return bool(self._jobs)

    def run(self, batch: Batch) -> None:
        """See `Runner.run`."""
        self._step([], batch.jobs, batch.closed)

    def _step(self, old: list[Job], new: Sequence[Job], now: float) -> None:
        self._jobs = [*old, *new]
        inputs = [Input(job.input.id, job.input.headers, []) for job in old]
        inputs += [job.input for job in new]
        queued = now - new[-1].arrived if new else 0.0
        self._send(inputs, partial(self._on_reply, Batch(self._jobs, now), queued))

    def _on_reply(self, step: Batch, queued: float, reply: Reply) -> None:
        if reply.more:
            _push(step, reply)
            return
        old: list[Job] = []
        if reply.code == 200:
            took = time.monotonic() - step.closed
            self.metrics.batch_done(_ids(step), len(step), queued, took, reply)
            old = _go_on_with(step.jobs, reply.predictions)
        else:
            step.fail(_failure(reply))
            self.metrics.batch_failed()
        if old:
            self._step(old, self._newcomers(old), time.monotonic())
        else:
            self._jobs = []
            self._go_on()

    def _newcomers(self, old: list[Job]) -> Sequence[Job]:
        room = self.batcher.size - len(old)
        group = old[0].group
        if self._resting or room <= 0 or group is Group.DESCRIBE:
            return ()
        return self.batcher.take(room, group)

    def _abandon(self) -> tuple[Sequence[Job], Sequence[Job]]:
        jobs, self._jobs = self._jobs, []
        return jobs, ()


@dataclass(eq=False)
class Concurrent(Runner):
    """Every request by itself, as soon as it comes; the handler is a coroutine.

    One whose worker died is on probation at first: until it is answered, or has run for a moment,
    no other joins it. If its new worker dies meanwhile, it is to blame, and those that were there
    before it have another try, their last. Requests by themselves are no batches, and stand in no
    history of them.
    """

    #: In the order in which they came; only the keys count.
    _jobs: dict[Job, None] = field(default_factory=dict, init=False)
    _suspect: Job | None = field(default=None, init=False)

    @property
    def is_busy(self) -> bool:
        """See `Serving.is_busy`."""
        return bool(self._jobs)

    def run(self, batch: Batch) -> None:
        """See `Runner.run`."""
        for job in batch.jobs:
            self._jobs[job] = None
            self._send([job.input], partial(self._on_reply, Batch([job], batch.closed)))
        if batch.jobs[0].crashes:
            self._suspect = suspect = batch.jobs[0]
            self._loop.call_later(_PROBATION_SECONDS, self._acquit, suspect)
        else:
            # Later: at once, a long queue would be worked off in ever deeper calls.
            self._loop.call_soon(self._enlist)

    def _acquit(self, job: Job) -> None:
        """End a probation, if it is not over yet."""
        if job is self._suspect:
            self._suspect = None
            self._enlist()

    def _enlist(self) -> None:
        if not self._resting:
            self.batcher.enlist(self)

    def _on_reply(self, batch: Batch, reply: Reply) -> None:
        if reply.more:
            _push(batch, reply)
            return
        (job,) = batch.jobs
        self._jobs.pop(job, None)
        if reply.code == 200:
            batch.deliver(reply.predictions)
            queued, took = batch.closed - job.arrived, time.monotonic() - batch.closed
            self.metrics.batch_done(_ids(batch), 1, queued, took, reply)
        else:
            batch.fail(_failure(reply))
            self.metrics.batch_failed()
        self._acquit(job)
        if self._resting:
            self._note_idle()

    def _abandon(self) -> tuple[Sequence[Job], Sequence[Job]]:
        jobs, self._jobs = list(self._jobs), {}
        suspect, self._suspect = self._suspect, None
        if suspect is None:
            return jobs, ()
        return [suspect], [job for job in jobs if job is not suspect]


def _ids(batch: Batch) -> Iterator[str]:
    return (job.input.id for job in batch.jobs)


def _push(batch: Batch, reply: Reply) -> None:
    if reply.code == 200:
        batch.push(reply.places, reply.predictions)
    else:
        batch.fail(_failure(reply))


def _failure(reply: Reply) -> ServeError:
    return PredictionFailed(reply.message, status=reply.code)


def _reason_to_halve(reply: Reply) -> Reason:
    return Reason.OUT_OF_MEMORY if reply.code == _OUT_OF_MEMORY else Reason.ISOLATION


def _go_on_with(jobs: Sequence[Job], predictions: Sequence[Prediction]) -> list[Job]:
    """Hand out a step's predictions; returns the jobs that need another one."""
    going_on = []
    for job, prediction in zip(jobs, predictions, strict=True):
        if prediction.headers.get(STREAM_NEXT) == "true":
            job.push(prediction)
            if job.is_open:
                going_on.append(job)
        else:
            job.resolve(prediction)
    return going_on
