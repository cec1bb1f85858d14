"""How a READY worker serves: which batches it asks for, and what becomes of their replies.

    OneAtATime    a batch, its reply, the next batch: what TorchServe does by default
    InSteps       continuous batching: a request stays for as many steps as its answer takes, and
                  others join between the steps
    Concurrent    asynchronous handlers: every request is sent at once, replies come in any order

The supervisor makes one of these for each life of its worker. Batches pass by the supervisor's
task, from event to event: an idle worker enlists with the batcher, is given a batch (`run`),
answers its jobs when the reply comes, and enlists again.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
from marserve.frontend.batching.batcher import Batch, Batcher
from marserve.frontend.batching.jobs import Group, Job
from marserve.frontend.errors import PredictionFailed, ServeError, WorkerDied
from marserve.frontend.telemetry.metrics import ModelMetrics
from marserve.frontend.workers.connection import OnReply, WorkerConnection


@dataclass(eq=False)
class Serving(ABC):
    """What a worker does from READY to its end.

    Args:
        connection: To the worker.
        batcher: Where its batches come from.
        metrics: What is counted, for its model.
        timeout: Seconds of silence after which a worker that owes a reply counts as hung; None for
            ever.
    """

    connection: WorkerConnection
    batcher: Batcher
    metrics: ModelMetrics
    timeout: float | None
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
    def run(self, batch: Batch) -> None:
        """Called by the batcher with the batch this worker asked for."""

    @abstractmethod
    def _abandon(self) -> Sequence[Job]:
        """Forget what is in hand; returns its jobs."""

    def begin(self) -> None:
        """Ask for the first batch."""
        self.batcher.enlist(self)

    def rest(self) -> None:
        """Ask for nothing more; what is in hand goes on. Safe to call twice."""
        self._resting = True
        self.batcher.withdraw(self)
        self._note_idle()

    def lose(self) -> None:
        """The worker has gone: fail what is in hand."""
        self.rest()
        jobs = self._abandon()
        for job in jobs:
            job.fail(WorkerDied())
        if jobs:
            self.metrics.batch_failed()
        self._note_idle()

    def _go_on(self) -> None:
        """Ask for the next batch, or be done."""
        if self._resting:
            self._note_idle()
        else:
            self.batcher.enlist(self)

    def _note_idle(self) -> None:
        if not self.is_busy and not self.idle.done():
            self.idle.set_result(None)

    def _send(self, inputs: list[Input], on_reply: OnReply) -> None:
        try:
            self.connection.predict(Predict(inputs), self.timeout, on_reply)
        except ProtocolError as error:
            # Later: it asks for the next batch, which may be no better, and so on.
            self._loop.call_soon(on_reply, Reply(507, str(error)))


@dataclass(eq=False)
class OneAtATime(Serving):
    """One batch in flight at most."""

    _batch: Batch | None = field(default=None, init=False)

    @property
    def is_busy(self) -> bool:
        """See `Serving.is_busy`."""
        return self._batch is not None

    def run(self, batch: Batch) -> None:
        """See `Serving.run`."""
        self._batch = batch
        self._send(batch.inputs, partial(self._on_reply, batch))

    def _on_reply(self, batch: Batch, reply: Reply) -> None:
        if reply.more:
            _push(batch, reply)
            return
        self._batch = None
        if reply.code == 200:
            batch.deliver(reply.predictions)
            queued, took = batch.closed - batch.jobs[-1].arrived, time.monotonic() - batch.closed
            self.metrics.batch_done(len(batch), queued, took, reply)
        else:
            batch.fail(_failure(reply))
            self.metrics.batch_failed()
        self._go_on()

    def _abandon(self) -> Sequence[Job]:
        batch, self._batch = self._batch, None
        return batch.jobs if batch is not None else ()


@dataclass(eq=False)
class InSteps(Serving):
    """Continuous batching: the requests under way are sent again, step by step.

    A request's header ``ts_stream_next: true`` in a step says that its answer goes on; its input
    is sent with the first step only. Clients that have left are left out of the next step.

    Args:
        size: Most requests in a step.
    """

    size: int
    _jobs: list[Job] = field(default_factory=list, init=False)

    @property
    def is_busy(self) -> bool:
        """See `Serving.is_busy`."""
        return bool(self._jobs)

    def run(self, batch: Batch) -> None:
        """See `Serving.run`."""
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
            self.metrics.batch_done(len(step), queued, time.monotonic() - step.closed, reply)
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
        room = self.size - len(old)
        group = old[0].group
        if self._resting or room <= 0 or group is Group.DESCRIBE:
            return ()
        return self.batcher.take(room, group)

    def _abandon(self) -> Sequence[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs


@dataclass(eq=False)
class Concurrent(Serving):
    """Every request by itself, as soon as it comes; the handler is a coroutine."""

    _jobs: set[Job] = field(default_factory=set, init=False)

    @property
    def is_busy(self) -> bool:
        """See `Serving.is_busy`."""
        return bool(self._jobs)

    def run(self, batch: Batch) -> None:
        """See `Serving.run`."""
        for job in batch.jobs:
            self._jobs.add(job)
            self._send([job.input], partial(self._on_reply, Batch([job], batch.closed)))
        # Later: at once, a long queue would be worked off in ever deeper calls.
        self._loop.call_soon(self._enlist)

    def _enlist(self) -> None:
        if not self._resting:
            self.batcher.enlist(self)

    def _on_reply(self, batch: Batch, reply: Reply) -> None:
        if reply.more:
            _push(batch, reply)
            return
        (job,) = batch.jobs
        self._jobs.discard(job)
        if reply.code == 200:
            batch.deliver(reply.predictions)
            queued, took = batch.closed - job.arrived, time.monotonic() - batch.closed
            self.metrics.batch_done(1, queued, took, reply)
        else:
            batch.fail(_failure(reply))
            self.metrics.batch_failed()
        if self._resting:
            self._note_idle()

    def _abandon(self) -> Sequence[Job]:
        jobs, self._jobs = self._jobs, set()
        return list(jobs)


def _push(batch: Batch, reply: Reply) -> None:
    if reply.code == 200:
        batch.push(reply.places, reply.predictions)
    else:
        batch.fail(_failure(reply))


def _failure(reply: Reply) -> ServeError:
    return PredictionFailed(reply.message, status=reply.code)


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
