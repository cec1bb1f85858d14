"""A prediction request of any transport, and its pending jobs, which answer and count it.

    request = PredictRequest(input_, arrived, by_version, options)
    ticket = model.submit(request, on_answer)    # or it raises the ServeError that is the answer
    ticket.cancel()                              # the client has left: on_answer is not called

``on_answer`` is called once with a Prediction, a ServeError, or a Stream, which the callee must
close: from the event loop, after `submit` has returned. It must not raise, because it is called
while the other requests of the batch are answered. Coroutines use ``await model.predict(request)``.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Protocol

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.jobs import Answer, Group, Job, Priority, Stream
from marserve.frontend.errors import (
    Overloaded,
    PredictionFailed,
    RequestExpired,
    SequenceOver,
    ServeError,
)
from marserve.frontend.security.usage import Holding
from marserve.frontend.telemetry.model_metrics import ModelMetrics, RequestCounters


@dataclass(frozen=True)
class RequestOptions:
    """Options of a client; ``timeout`` is in seconds from the request's arrival."""

    timeout: float = math.inf
    priority: Priority = Priority.NORMAL


NO_OPTIONS = RequestOptions()


@dataclass(slots=True)
class PredictRequest:
    """One request to a model, as any transport submits it."""

    #: The header ``explain: True`` requests an explanation; a header ``describe`` is removed.
    input: Input
    arrived: float  # seconds on the monotonic clock
    by_version: bool  # whether the client named the version
    options: RequestOptions = NO_OPTIONS
    describe: bool = False  # whether the handler must describe its model; such are not counted
    #: Whether it is a part of an accepted request, which is served while the server stops.
    continues: bool = False
    #: Makes a counter of its memory, beside the input and the answer.
    holding: Callable[[], Holding] = Holding


#: The answer to requests submitted together: their predictions in order, up to the first with a
#: status other than 200; or the error of the first that failed.
JointAnswer = list[Prediction] | ServeError
OnJointAnswer = Callable[[JointAnswer], None]


_REASONS_UNSERVED: Mapping[type, str] = {
    NoneType: "client_gone",
    Overloaded: "overloaded",
    RequestExpired: "expired",
    SequenceOver: "sequence_over",
}


class Ticket(Protocol):
    """Handle of an accepted request, to cancel it."""

    @property
    def dispatched(self) -> float | None:
        """Moment at which it was sent to a worker, monotonic; None while it is queued."""

    def cancel(self) -> None:
        """Stop waiting for the answer, or for the rest of a stream; valid at any time."""


@dataclass(eq=False)
class PendingRequests:
    """The accepted and unanswered requests of one model version; ``jobs`` is their number."""

    batcher: Batcher
    metrics: ModelMetrics
    max_stream_backlog: int
    jobs: int = field(default=0, init=False)
    _drained: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def drained(self) -> None:
        """Wait until all are answered; callers set the deadline."""
        if self.jobs:
            self._drained.clear()
            await self._drained.wait()

    def remove(self, jobs: int) -> None:
        """Count jobs as answered or cancelled."""
        self.jobs -= jobs
        if not self.jobs:
            self._drained.set()

    def counters_of(self, request: PredictRequest) -> RequestCounters:
        """Return the counters of a request."""
        return self.metrics.versioned if request.by_version else self.metrics.unversioned

    def count_unserved(self, answer: Answer | JointAnswer | None) -> None:
        """Count a request that was not sent to a worker; ``answer`` is None if its client left."""
        self.metrics.rejected(_REASONS_UNSERVED.get(type(answer), "no_worker"))

    def count_stream(
        self, counters: RequestCounters, arrived: float, queued: float, complete: bool
    ) -> None:
        """Count a streamed answer when it ends."""
        self.remove(1)
        if complete:
            counters.answered(queued, time.monotonic() - arrived)


class _RequestJob(Job):
    """A job whose failures name its request, and come in the next turn of the event loop if queued.

    The batcher fails jobs within `submit` and while it forms batches, when a transport has no
    ticket yet and must not submit further requests.
    """

    __slots__ = ()

    def fail(self, error: ServeError) -> None:
        if isinstance(error, PredictionFailed):
            error = error.of(self.input.id.partition(".")[0])  # without the number of a row
        if self.dispatched is None:
            asyncio.get_running_loop().call_soon(self.answer, error)
        else:
            super().fail(error)


@dataclass(slots=True, eq=False, kw_only=True)
class PendingJob(_RequestJob):
    """The job of a single request, and its `Ticket`."""

    pending: PendingRequests
    request_arrived: float
    counters: RequestCounters
    timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def answer(self, answer: Answer) -> None:
        """Count the answer, and pass it on."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is None:
            return
        if type(answer) is Stream:
            self._begin(answer)
        else:
            self._end(answer)
            if self.on_end is not None:
                self.on_end()
        on_answer(answer)

    def expire(self, error: ServeError) -> None:
        """Answer that its time is over."""
        self.fail(error)

    def cancel(self) -> None:
        """Stop waiting for the answer."""
        if self.on_answer is not None:
            self._end(None)
        Job.cancel(self)  # not super(): slots=True replaces the class

    def discard(self) -> None:
        """Leave the queue, unless it was refused there."""
        self.pending.batcher.queue.discard(self)

    def _begin(self, stream: Stream) -> None:
        """Start a stream, and end the timer: the deadline is that of the first piece."""
        if self.timer is not None:
            self.timer.cancel()
        assert self.dispatched is not None
        pending, waited = self.pending, self.dispatched - self.arrived
        stream.max_waiting_bytes = pending.max_stream_backlog
        # Not a bound method of this job, which refers to the stream: that would be a cycle.
        stream.on_close = partial(pending.count_stream, self.counters, self.request_arrived, waited)

    def _end(self, answer: Answer | None) -> None:
        pending = self.pending
        if self.timer is not None:
            self.timer.cancel()
        pending.remove(1)
        if self.dispatched is None:
            self.discard()
            pending.count_unserved(answer)
        elif type(answer) is Prediction and self.group is not Group.DESCRIBE:
            now = time.monotonic()
            self.counters.answered(self.dispatched - self.arrived, now - self.request_arrived)
            if self.deadline < math.inf:
                pending.batcher.deadline_admission.answer_sent(now)


class _RowJob(_RequestJob):
    __slots__ = ()
    is_row_of_list = True


class PendingRows:
    """The jobs of requests submitted together; one `Ticket`, counted as one request."""

    def __init__(
        self,
        pending: PendingRequests,
        requests: Sequence[PredictRequest],
        queued: float,
        deadline: float,
        on_answer: OnJointAnswer,
    ) -> None:
        first = requests[0]
        self._pending = pending
        self._arrived, self._queued = first.arrived, queued
        self._on_answer: OnJointAnswer | None = on_answer
        self._predictions: list[Prediction] = []
        #: Answers out of order, by index.
        self._early: dict[int, Prediction | ServeError] = {}
        self._holding = first.holding()
        self.timer: asyncio.TimerHandle | None = None
        self.counters = pending.counters_of(first)
        make = _RowJob if len(requests) > 1 else _RequestJob
        self.jobs = [
            make(
                request.input,
                queued,
                partial(self._collect, index),
                group_of(request),
                deadline=deadline,
                priority=first.options.priority,
            )
            for index, request in enumerate(requests)
        ]

    @property
    def dispatched(self) -> float | None:
        """Moment at which the first job was sent to a worker."""
        return self.jobs[0].dispatched

    def cancel(self) -> None:
        """Stop waiting for the answers."""
        self._end(None)

    def expire(self, error: ServeError) -> None:
        """Answer that its time is over."""
        self._end(error)

    def _collect(self, index: int, answer: Answer) -> None:
        if isinstance(answer, Stream):
            answer.close()  # its pieces would wait in memory for the rows before it
            answer = ServeError("The model streams its answers, which cannot be items of a list.")
        if isinstance(answer, Prediction):
            try:
                self._holding.hold(len(answer.body))
            except ServeError as error:
                answer = error
        self._early[index] = answer
        predictions = self._predictions
        while self._on_answer is not None and len(predictions) in self._early:
            answer = self._early.pop(len(predictions))
            if isinstance(answer, Prediction):
                predictions.append(answer)
                if answer.status != 200 or len(predictions) == len(self.jobs):
                    self._end(predictions)
            else:
                self._end(answer)

    def _end(self, answer: JointAnswer | None) -> None:
        """Answer once, and release everything; ``answer`` is None if the client has left."""
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is None:
            return
        pending, jobs = self._pending, self.jobs
        self._holding.close()
        if self.timer is not None:
            self.timer.cancel()
        for job in jobs:
            job.cancel()
            pending.batcher.queue.discard(job)
        pending.remove(len(jobs))
        if jobs[0].dispatched is None:
            pending.count_unserved(answer)
        elif isinstance(answer, list):
            waited = max(job.dispatched or self._queued for job in jobs) - self._queued
            self.counters.answered(waited, time.monotonic() - self._arrived)
        if answer is not None:
            on_answer(answer)


def group_of(request: PredictRequest) -> Group:
    """Return the group of requests that it may share a batch with."""
    headers = request.input.headers
    # Only the server sets this header: a client's would turn the whole batch into descriptions.
    headers.pop("describe", None)
    if request.describe:
        headers["describe"] = "True"
        return Group.DESCRIBE
    return Group.EXPLAIN if headers.get("explain") == "True" else Group.PREDICT
