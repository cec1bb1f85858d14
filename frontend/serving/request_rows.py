"""The rows of one request: a job for each, one answer for all of them, in order.

The rows of a long list are queued in pieces (`long_lists`): those before ``_next`` are queued, in a
worker or answered, the others wait here and hold nothing of the queue.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.batching.jobs import Answer, Job, Stream
from marserve.frontend.errors import ServeError
from marserve.frontend.serving.predict_request import (
    JointAnswer,
    OnJointAnswer,
    PendingRequests,
    PredictRequest,
    RequestJob,
    group_of,
    outcome_of,
)
from marserve.frontend.tracing.time_lines import ANSWERED, TimeLine

#: Rows of a request, unless the queue has capacity for more: some 120 MB of memory.
MAX_ROWS = 100_000


class _RowJob(RequestJob):
    __slots__ = ()
    is_row_of_list = True


class Rows(NamedTuple):
    """The rows of a request, and the bytes of their inputs."""

    jobs: Sequence[Job]
    size: int


def jobs_of(request: PredictRequest, inputs: Sequence[Input]) -> Steps[Rows]:
    """Return the jobs of the rows of a request, whose bytes are counted already."""
    make = _RowJob if len(inputs) > 1 else RequestJob
    jobs, size = list[Job](), 0
    for row in inputs:
        group, priority = group_of(request, row), request.options.priority
        jobs.append(make(row, 0.0, None, group, priority=priority, trace=request.trace))
        size += row.size
        yield 0
    return Rows(jobs, size)


def _nothing() -> None:
    pass


class PendingRows:
    """The jobs of the rows of a request; one `Ticket`, counted as one request."""

    def __init__(
        self,
        pending: PendingRequests,
        request: PredictRequest,
        rows: Rows,
        queued: float,
        deadline: float,
        on_answer: OnJointAnswer,
    ) -> None:
        self._pending = pending
        self._arrived, self._queued = request.arrived, queued
        self._deadline = deadline
        self._on_answer: OnJointAnswer | None = on_answer
        self._predictions: list[Prediction] = []
        #: Answers out of order, by index.
        self._early: dict[int, Prediction | ServeError] = {}
        self._memory = request.memory
        self._nested_in = request.nested_in
        self.timer: asyncio.TimerHandle | None = None
        self.counters = pending.counters_of(request)
        self._jobs, self._size = rows
        self._next = 0
        #: The rows that are queued or in a worker, by index.
        self._in_flight: dict[int, Job] = {}
        self._last = self._jobs[0]  # of the answered rows the one that was sent last
        #: Called once when the list is answered or cancelled.
        self.on_end: Callable[[], object] = _nothing

    @property
    def dispatched(self) -> float | None:
        """Moment at which the first job was sent to a worker."""
        return self._jobs[0].dispatched

    @property
    def unqueued(self) -> int:
        """Number of rows that were not queued yet."""
        return len(self._jobs) - self._next

    def next_jobs(self, count: int, now: float) -> Sequence[Job]:
        """Return the next rows, at most ``count``, which the caller queues now."""
        jobs = self._jobs[self._next : self._next + count]
        for index, job in enumerate(jobs, start=self._next):
            job.arrived, job.deadline = now, self._deadline
            job.on_answer = partial(self._collect, index)
            self._in_flight[index] = job
        self._next += len(jobs)
        self._pending.jobs += len(jobs)
        return jobs

    def cancel(self) -> None:
        """Stop waiting for the answers."""
        self._end(None)

    def expire(self, error: ServeError) -> None:
        """Answer with an error, for example that its time is over."""
        self._end(error)

    def release(self) -> None:
        """Release the jobs that are queued or in a worker, which refer to this object."""
        jobs = [*self._in_flight.values()]
        self._in_flight.clear()
        for job in jobs:
            job.cancel()
        if jobs:
            self._pending.batcher.queue.discard_all(jobs)
        self._pending.remove(len(jobs))

    def _collect(self, index: int, answer: Answer) -> None:
        if isinstance(answer, Stream):
            answer.close()  # its pieces would wait in memory for the rows before it
            answer = ServeError("The model streams its answers, which cannot be items of a list.")
        if isinstance(answer, Prediction):
            try:
                self._memory.hold(len(answer.body))
            except ServeError as error:
                answer = error
        job = self._in_flight.pop(index, None)
        if job is None:  # all are being released
            return
        self._last = max(self._last, job, key=_dispatched)
        self._early[index] = answer
        predictions = self._predictions
        while self._on_answer is not None and len(predictions) in self._early:
            answer = self._early.pop(len(predictions))
            if isinstance(answer, Prediction):
                predictions.append(answer)
                if answer.status != 200 or len(predictions) == len(self._jobs):
                    self._end(predictions)
            else:
                self._end(answer)
        self._pending.remove(1)

    def _end(self, answer: JointAnswer | None) -> None:
        """Answer once, and release everything; ``answer`` is None if the client has left."""
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is None:
            return
        pending, first = self._pending, self._jobs[0]
        if self.timer is not None:
            self.timer.cancel()
        last = max((self._last, *self._in_flight.values()), key=_dispatched)
        on_end, self.on_end = self.on_end, _nothing  # which may refer to this object
        on_end()
        self.release()
        line = TimeLine(
            first.input.id.rpartition(".")[0] or first.input.id,
            pending.lines,
            self._arrived,
            self._queued,
            last.batch,
            time.monotonic(),
            *outcome_of(answer),
            self._size,
            last.crashes + 1,
            trace=last.trace,
        )
        pending.lines.add(line)
        if self._nested_in is not None:
            self._nested_in.nest(line)
        if first.dispatched is None:
            pending.count_unserved(answer)
        elif isinstance(answer, list):
            self.counters.answered(
                (last.dispatched or self._queued) - self._queued, line.took, line
            )
        if first.dispatched is not None and line.outcome != ANSWERED:
            pending.count_failed(answer)
        if answer is not None:
            on_answer(answer)


def _dispatched(job: Job) -> float:
    return job.dispatched or 0.0
