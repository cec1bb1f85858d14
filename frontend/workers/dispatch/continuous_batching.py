"""The dispatch strategy for continuous batching: running requests are sent again, step by step.

The response header ``ts_stream_next: true`` in a step means that the answer continues. Other
requests may join before each step, and cancelled ones leave.

A step that fails fails all of its requests: it cannot be split, because the handler keeps state for
them. Steps are not recorded in the history of batches nor in the learnt costs.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from marserve.backend.protocol import STREAM_NEXT, Input, Piece, Prediction, Reply
from marserve.frontend.batching.batches import Batch, failure_of, release_batches
from marserve.frontend.batching.jobs import Group, Job
from marserve.frontend.workers.connection import BatchAnswer
from marserve.frontend.workers.dispatch.batched import DispatchStrategy, InFlight, hint_of


@dataclass(eq=False)
class ContinuousBatching(DispatchStrategy):
    """Sends a batch again until all of its requests are answered, with others that join it."""

    #: The batch of the first step, and the jobs in the current one.
    _first: Batch | None = field(default=None, init=False)
    _in_flight: list[Job] = field(default_factory=list, init=False)

    def run(self, batch: Batch) -> None:
        """Send the first step of a batch."""
        self._first = batch
        self._count_suspected(batch)
        self._step([], batch.jobs, batch.closed)
        batch.release()

    def _step(self, old: list[Job], new: Sequence[Job], now: float) -> None:
        self._in_flight = [*old, *new]
        for job in new:
            job.batch = Batch([job], now, worker_id=self.worker_id)
        inputs = [Input(job.input.id, job.input.headers, []) for job in old]
        inputs += [job.input for job in new]
        queued = now - new[-1].arrived if new else 0.0
        self._send(inputs, partial(self._on_reply, Batch(self._in_flight, now), queued))

    def _on_reply(self, step: Batch, queued: float, reply: BatchAnswer) -> None:
        if isinstance(reply, Piece):
            step.push(reply)
        if not isinstance(reply, Reply):
            return
        unfinished: list[Job] = []
        for job in step.jobs:
            if job.batch is not None:
                job.batch.ran_step(reply)
        if reply.code == 200:
            self._forget_answered(step.jobs)
            took = time.monotonic() - step.closed
            example = step.jobs[0].input.id
            self.metrics.batch_done(step.ids, len(step), queued, took, reply, example=example)
            unfinished = _deliver(step.jobs, reply.predictions)
        else:
            self._remember_cause(step, reply)
            self.metrics.reported(reply.metrics)
            step.fail(failure_of(reply))
            self.metrics.failed_batches.update(1)
        for job in step.jobs:
            if job.batch is not None and job not in unfinished:
                job.batch.release()
        if unfinished:
            self._step(unfinished, self._newcomers(unfinished), time.monotonic())
        else:
            done, self._first, self._in_flight = self._first, None, []
            self._ask(done)

    def _forget_answered(self, jobs: Sequence[Job]) -> None:
        # Each has run a step alone, and may share batches again.
        isolation = self.batcher.isolation
        for job in jobs if isolation.contents else ():
            if job.is_suspected:
                isolation.contents.discard(job)

    def _remember_cause(self, step: Batch, reply: Reply) -> None:
        # If the cause is known, it runs alone next time.
        hint = hint_of(reply, step)
        if self.batcher.batching.isolates and (hint is not None or len(step) == 1):
            self.batcher.isolation.remember(hint.suspect if hint else step.jobs[0])

    def _newcomers(self, unfinished: list[Job]) -> Sequence[Job]:
        group = unfinished[0].group
        if self._is_stopping or group is Group.DESCRIBE:
            return ()
        return self.batcher.take(group, len(unfinished))

    def _batches_in_flight(self) -> Iterable[Batch]:
        return (self._first,) if self._first is not None else ()

    def _take_in_flight(self) -> InFlight:
        jobs, self._in_flight = self._in_flight, []
        release_batches(jobs)
        return jobs, ()


def _deliver(jobs: Sequence[Job], predictions: Sequence[Prediction]) -> list[Job]:
    """Answer with a step's predictions; return the jobs that need another step."""
    unfinished = []
    for job, prediction in zip(jobs, predictions, strict=True):
        if prediction.headers.get(STREAM_NEXT) == "true":
            job.push(prediction)
            if job.is_open:
                unfinished.append(job)
        else:
            job.resolve(prediction)
    return unfinished
