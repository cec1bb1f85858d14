"""One request to a model: what a transport asks, and how it is answered and counted.

    request = PredictRequest(input_, arrived, by_version, options)
    ticket = model.submit(request, on_answer)    # or it raises the ServeError that is the answer
    ticket.cancel()                              # the client has left: nothing is called any more

``on_answer`` gets a Prediction, a ServeError, or a Stream, which is to be closed when it is read or
nobody reads it. It is called once, from the event loop, never before `submit` has returned. It must
not raise: it is called while the other requests of the batch are answered. A coroutine says
``await model.predict(request)`` instead.

Nothing else is a transport's business: seats, job tickets, deadlines, and what is counted, timed
and given back when the answer comes, are dealt with before it is passed on.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Answer, Group, Job, Priority, Stream
from marserve.frontend.errors import Overloaded, RequestExpired, ServeError
from marserve.frontend.telemetry.model_metrics import ModelMetrics, RequestCounters


@dataclass(frozen=True)
class RequestOptions:
    """How soon a client wants its answer; ``timeout`` is in seconds from the request's arrival."""

    timeout: float = math.inf
    priority: Priority = Priority.NORMAL


NO_OPTIONS = RequestOptions()


@dataclass(slots=True)
class PredictRequest:
    """What a model is asked, whatever the transport.

    Attributes:
        input: Parts, and headers as the handler sees them. The header ``explain: True`` asks for an
            explanation; whatever is in ``describe`` is replaced.
        arrived: Seconds on the monotonic clock.
        by_version: Whether the client named the version.
        describe: Whether the handler is to describe its model. Such requests are not counted.
    """

    input: Input
    arrived: float
    by_version: bool
    options: RequestOptions = NO_OPTIONS
    describe: bool = False


#: What becomes of requests that belong together: their predictions in order, up to the first whose
#: status is not 200; or the failure of the first that was not answered.
JointAnswer = list[Prediction] | ServeError
OnJointAnswer = Callable[[JointAnswer], None]


class Ticket(Protocol):
    """A request that was taken in."""

    def cancel(self) -> None:
        """Give up waiting: for the answer, or for the rest of a stream. Safe at any time."""


@dataclass(eq=False)
class PendingRequests:
    """The requests of one model version that were taken in and are not answered yet."""

    queue: JobQueue
    batcher: Batcher
    metrics: ModelMetrics
    max_stream_backlog: int
    #: How many jobs they are.
    jobs: int = field(default=0, init=False)
    _drained: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def drained(self) -> None:
        """Wait until all are answered. It has no deadline: callers have."""
        if self.jobs:
            self._drained.clear()
            await self._drained.wait()

    def remove(self, jobs: int) -> None:
        """Note that nobody waits for so many jobs any more."""
        self.jobs -= jobs
        if not self.jobs:
            self._drained.set()

    def counters_of(self, request: PredictRequest) -> RequestCounters:
        """Where a request is counted."""
        return self.metrics.versioned if request.by_version else self.metrics.unversioned

    def count_unserved(self, answer: Answer | JointAnswer | None) -> None:
        """Count a request that no worker has had; its answer is None where its client has left."""
        if answer is None:
            self.metrics.rejected("client_gone")
        elif isinstance(answer, Overloaded):
            self.metrics.rejected("overloaded")
        else:
            self.metrics.rejected("expired" if isinstance(answer, RequestExpired) else "no_worker")

    def count_stream(
        self, counters: RequestCounters, arrived: float, queued: float, complete: bool
    ) -> None:
        """Count an answer in pieces at its end."""
        self.remove(1)
        if complete:
            counters.answered(queued, time.monotonic() - arrived)


class _RequestJob(Job):
    """The job of a request; it fails a turn of the loop later, if no worker has had it.

    The batcher refuses jobs within `submit`, and while it makes batches of others. A transport
    called back then would not know its ticket yet, or submit more into a batch half made.
    """

    __slots__ = ()

    def fail(self, error: ServeError) -> None:
        if self.dispatched is None:
            asyncio.get_running_loop().call_soon(self.answer, error)
        else:
            super().fail(error)


@dataclass(slots=True, eq=False, kw_only=True)
class PendingJob(_RequestJob):
    """The job of a request that came alone; its `Ticket`."""

    pending: PendingRequests
    request_arrived: float
    counters: RequestCounters
    timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def answer(self, answer: Answer) -> None:
        """See `Job.answer`."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is None:
            return
        if type(answer) is Stream:
            self._begin(answer)
        else:
            self._end(answer)
        on_answer(answer)

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        if self.on_answer is not None:
            self._end(None)
        Job.cancel(self)  # not super(): slots make another class of what the decorator got

    def _begin(self, stream: Stream) -> None:
        """End the waiting: the first piece is in time, however long the rest takes."""
        if self.timer is not None:
            self.timer.cancel()
        assert self.dispatched is not None
        pending, waited = self.pending, self.dispatched - self.arrived
        stream.max_waiting_bytes = pending.max_stream_backlog
        # Not a method of this job, which holds the stream: that would be a cycle.
        stream.on_close = partial(pending.count_stream, self.counters, self.request_arrived, waited)

    def _end(self, answer: Answer | None) -> None:
        pending = self.pending
        if self.timer is not None:
            self.timer.cancel()
        pending.remove(1)
        if self.dispatched is None:
            pending.queue.discard(self)
            pending.count_unserved(answer)
        elif type(answer) is Prediction and self.group is not Group.DESCRIBE:
            now = time.monotonic()
            self.counters.answered(self.dispatched - self.arrived, now - self.request_arrived)
            if self.deadline < math.inf:
                pending.batcher.deadlines.answer_sent(now)


class PendingRows:
    """The jobs of requests that belong together, in their order; one `Ticket`, counted as one."""

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
        #: What has come before its turn, by place.
        self._early: dict[int, Answer] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.counters = pending.counters_of(first)
        self.jobs = [
            _RequestJob(
                request.input,
                queued,
                partial(self._take, place),
                group_of(request),
                deadline=deadline,
                priority=first.options.priority,
            )
            for place, request in enumerate(requests)
        ]

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        self._end(None)

    def fail(self, error: ServeError) -> None:
        """Answer with a failure."""
        self._end(error)

    def _take(self, place: int, answer: Answer) -> None:
        """Take the answer to one of the jobs."""
        self._early[place] = answer
        predictions = self._predictions
        while self._on_answer is not None and len(predictions) in self._early:
            answer = self._early.pop(len(predictions))
            if isinstance(answer, Prediction):
                predictions.append(answer)
                if answer.status != 200 or len(predictions) == len(self.jobs):
                    self._end(predictions)
            elif isinstance(answer, ServeError):
                self._end(answer)
            else:
                self._end(ServeError("The model answers in pieces; such answers make no list."))

    def _end(self, answer: JointAnswer | None) -> None:
        """Answer with this, or none where the client has left; nothing after the first time."""
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is None:
            return
        pending, jobs = self._pending, self.jobs
        if self.timer is not None:
            self.timer.cancel()
        for job in jobs:
            job.cancel()
            pending.queue.discard(job)
        pending.remove(len(jobs))
        if jobs[0].dispatched is None:
            pending.count_unserved(answer)
        elif isinstance(answer, list):
            waited = max(job.dispatched or self._queued for job in jobs) - self._queued
            self.counters.answered(waited, time.monotonic() - self._arrived)
        if answer is not None:
            on_answer(answer)


def group_of(request: PredictRequest) -> Group:
    """Which requests it may share a batch with, by its headers."""
    headers = request.input.headers
    # The server's word to the handler: a client must not order a description for its batch.
    headers.pop("describe", None)
    if request.describe:
        headers["describe"] = "True"
        return Group.DESCRIBE
    return Group.EXPLAIN if headers.get("explain") == "True" else Group.PREDICT
