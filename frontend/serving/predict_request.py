"""A prediction request of any transport, and its pending jobs, which answer and count it.

    request = PredictRequest(input_, memory, arrived, by_version, options)
    ticket = model.submit(request, on_answer)    # or it raises the ServeError that is the answer
    ticket.cancel()                              # the client has left: on_answer is not called

``on_answer`` is called once with a Prediction, a ServeError, or a Stream, which the callee must
close: from the event loop, after `submit` has returned. It must not raise, because it is called
while the other requests of the batch are answered. Coroutines use ``await model.predict(request)``.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Protocol

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.jobs import Answer, Group, Job, Priority, Stream
from marserve.frontend.errors import (
    NoWorker,
    Overloaded,
    PredictionFailed,
    RequestExpired,
    SequenceOver,
    ServeError,
    WorkerDied,
)
from marserve.frontend.security.usage import RequestMemory
from marserve.frontend.telemetry.model_metrics import ModelMetrics, RequestCounters
from marserve.frontend.telemetry.trace_context import RequestTrace
from marserve.frontend.tracing.time_lines import (
    ANSWERED,
    CANCELLED,
    EXPIRED,
    FAILED,
    REFUSED,
    ModelLines,
    NestedLines,
    TimeLine,
)


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
    memory: RequestMemory
    arrived: float  # seconds on the monotonic clock
    by_version: bool  # whether the client named the version
    options: RequestOptions = NO_OPTIONS
    describe: bool = False  # whether the handler must describe its model; such are not counted
    #: Whether it is a part of an accepted request, which is served while the server stops.
    continues: bool = False
    #: The nested time lines of the request that waits for this one.
    nested_in: NestedLines | None = None
    trace: RequestTrace | None = None


#: The answer to the rows of a request: their predictions in order, up to the first with a status
#: other than 200; or the error of the first that failed.
JointAnswer = list[Prediction] | ServeError
OnJointAnswer = Callable[[JointAnswer], None]


_REASONS_UNSERVED: Mapping[type, str] = {
    NoneType: "client_gone",
    Overloaded: "overloaded",
    RequestExpired: "expired",
    SequenceOver: "sequence_over",
}
#: The reason of a failure that the handler has answered itself, with a status of 500 or more.
HANDLER_STATUS = "handler_status"
_REASONS_FAILED: Mapping[type, str] = {
    NoneType: "client_gone",
    Prediction: HANDLER_STATUS,
    PredictionFailed: "handler",
    RequestExpired: "expired",
    SequenceOver: "sequence_over",
    WorkerDied: "worker_died",
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
    """The accepted and unanswered requests of one model version.

    ``jobs`` is the number of their jobs that are queued or in a worker, and ``long_lists`` that of
    lists with rows that are not queued yet.
    """

    batcher: Batcher
    metrics: ModelMetrics
    lines: ModelLines
    max_stream_backlog: int
    jobs: int = field(default=0, init=False)
    long_lists: int = field(default=0, init=False)
    _drained: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def drained(self) -> None:
        """Wait until all are answered; callers set the deadline."""
        if self.jobs or self.long_lists:
            self._drained.clear()
            await self._drained.wait()

    def remove(self, jobs: int) -> None:
        """Count jobs as answered or cancelled."""
        self.jobs -= jobs
        if not self.jobs and not self.long_lists:
            self._drained.set()

    def counters_of(self, request: PredictRequest) -> RequestCounters:
        """Return the counters of a request."""
        return self.metrics.versioned if request.by_version else self.metrics.unversioned

    def count_unserved(self, answer: Answer | JointAnswer | None) -> None:
        """Count a request that was not sent to a worker; ``answer`` is None if its client left."""
        self.metrics.rejected(_REASONS_UNSERVED.get(type(answer), "no_worker"))

    def count_failed(self, answer: Answer | JointAnswer | None) -> None:
        """Count a request that a worker had, and that has no answer of the handler."""
        answer = answer[-1] if isinstance(answer, list) else answer
        self.metrics.request_failed(_REASONS_FAILED.get(type(answer), "other"))

    def end_stream(
        self,
        counters: RequestCounters,
        line: TimeLine,
        nested_in: NestedLines | None,
        complete: bool,
        broken: str,
    ) -> None:
        """Count a streamed answer when it ends; ``line`` is its time line so far."""
        self.remove(1)
        line = line._replace(answered=time.monotonic())
        if complete:
            waited = 0.0 if line.batch is None else max(0.0, line.batch.closed - line.queued)
            counters.answered(waited, line.took, line)
        elif broken:
            line = line._replace(outcome=FAILED, status=500, error=broken)
            self.metrics.request_failed("broken")
        else:
            line = line._replace(outcome=CANCELLED, status=499)
            self.metrics.request_failed("client_gone")
        self.lines.add(line)
        if nested_in is not None:
            nested_in.nest(line)


def outcome_of(answer: Answer | JointAnswer | None) -> tuple[str, int, str]:
    """Return the outcome, the status and the error of an answer; None if the client has left."""
    if isinstance(answer, ServeError):
        is_refused = isinstance(answer, NoWorker | Overloaded)
        outcome = REFUSED if is_refused else FAILED
        outcome = EXPIRED if isinstance(answer, RequestExpired) else outcome
        return outcome, answer.status, answer.reason
    if isinstance(answer, list):
        answer = answer[-1]
    if answer is None or isinstance(answer, Stream):
        return CANCELLED, 499, ""
    return FAILED if answer.status >= 500 else ANSWERED, answer.status, ""


class RequestJob(Job):
    """A job whose failures name its request, and come in the next turn of the event loop if queued.

    The batcher fails jobs within `submit` and while it forms batches, when a transport has no
    ticket yet and must not submit further requests.
    """

    __slots__ = ()

    def fail(self, error: ServeError) -> None:
        """Answer with a failure."""
        if isinstance(error, PredictionFailed):
            error = error.of(self.input.id.partition(".")[0])  # without the number of a row
        if self.dispatched is None:
            asyncio.get_running_loop().call_soon(self.answer, error)
        else:
            super().fail(error)


@dataclass(slots=True, eq=False, kw_only=True)
class PendingJob(RequestJob):
    """The job of a single request, and its `Ticket`."""

    pending: PendingRequests
    request_arrived: float
    counters: RequestCounters
    nested_in: NestedLines | None
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
        pending = self.pending
        stream.max_waiting_bytes = pending.max_stream_backlog
        line = self._line(ANSWERED, 200, "", 0.0)._replace(first_piece=time.monotonic())
        # Not a bound method of this job, which refers to the stream: that would be a cycle.
        stream.on_close = partial(pending.end_stream, self.counters, line, self.nested_in)

    def _end(self, answer: Answer | None) -> None:
        pending = self.pending
        if self.timer is not None:
            self.timer.cancel()
        pending.remove(1)
        now = time.monotonic()
        if self.group is Group.DESCRIBE:
            if self.dispatched is None:
                self.discard()
                pending.count_unserved(answer)
            return
        if type(answer) is Prediction:
            outcome = ANSWERED if answer.status < 500 else FAILED
            line = self._line(outcome, answer.status, "", now)
            took = now - self.request_arrived
            pending.lines.answered(line, took)
            assert self.dispatched is not None
            self.counters.answered(self.dispatched - self.arrived, took, line)
            if self.deadline < math.inf:
                pending.batcher.deadline_admission.answer_sent(now)
        else:
            line = self._line(*outcome_of(answer), now)
            pending.lines.add(line)
        if self.nested_in is not None:
            self.nested_in.nest(line)
        if self.dispatched is None:
            self.discard()
            pending.count_unserved(answer)
        elif line.outcome is not ANSWERED:
            pending.count_failed(answer)

    def _line(self, outcome: str, status: int, error: str, now: float) -> TimeLine:
        parts = self.input.parts
        fields = (
            self.input.id,
            self.pending.lines,
            self.request_arrived,
            self.arrived,
            self.batch,
            now,
            outcome,
            status,
            error,
            len(parts[0].body) if len(parts) == 1 else self.input.size,
            self.crashes + 1,
            self.nested or (),
            self.trace,
            0.0,
        )
        return tuple.__new__(TimeLine, fields)  # a third of the time of TimeLine(*fields)


def group_of(request: PredictRequest, input_: Input) -> Group:
    """Return the group of requests that an input of this request may share a batch with."""
    headers = input_.headers
    # Only the server sets this header: a client's would turn the whole batch into descriptions.
    headers.pop("describe", None)
    if request.describe:
        headers["describe"] = "True"
        return Group.DESCRIBE
    return Group.EXPLAIN if headers.get("explain") == "True" else Group.PREDICT
