"""The way in: a transport submits a request to a model and is called back with the answer.

All that a transport (HTTP, gRPC, a workflow's node) has to do:

    request = PredictRequest(input_, arrived, by_version, options)
    ticket = model.submit(request, on_answer)    # or it raises the ServeError that is the answer

    def on_answer(answer: Answer) -> None:       # a Prediction, a ServeError, or a Stream, which is
        ...                                      # to be closed when it is read or nobody reads it

    ticket.cancel()                              # the client has left: nothing is called any more

A coroutine says ``await model.predict(request)`` instead. ``on_answer`` is called once, from the
event loop, never before `submit` has returned. It must not raise, and must not submit anything
itself (but by ``call_soon``): it may be called while a batch is being made or taken apart.

Whether there is room, what is counted, timed and given back is decided here and nowhere else.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.jobs import Answer, Group, Job, JobQueue, OnAnswer, Priority
from marserve.frontend.batching.streams import Stream
from marserve.frontend.errors import NoWorker, Overloaded, RequestExpired, ServeError, WorkerDied
from marserve.frontend.models.settings.model_settings import ModelSettings
from marserve.frontend.models.worker_pool import WorkerPool
from marserve.frontend.telemetry.metrics import ModelMetrics, RequestCounters


@dataclass(frozen=True)
class RequestOptions:
    """How soon a client wants its answer.

    Attributes:
        timeout: Seconds from the arrival of the request; infinite for as long as it takes.
        priority: Its class.
    """

    timeout: float = math.inf
    priority: Priority = Priority.NORMAL


NO_OPTIONS = RequestOptions()


@dataclass(slots=True)
class PredictRequest:
    """What a model is asked, whatever the transport.

    Attributes:
        input: What the client sent: parts, and headers as the handler sees them. The header
            ``explain: True`` asks for an explanation; ``describe`` is for `submit` to set.
        arrived: Moment of arrival, on the monotonic clock.
        by_version: Whether the client named the version.
        options: How soon it wants the answer.
        describe: Whether the handler is to describe its model. Such requests are not counted.
    """

    input: Input
    arrived: float
    by_version: bool
    options: RequestOptions = NO_OPTIONS
    describe: bool = False

    @property
    def group(self) -> Group:
        """Which requests it may share a batch with."""
        if self.describe:
            return Group.DESCRIBE
        is_explain = self.input.headers.get("explain") == "True"
        return Group.EXPLAIN if is_explain else Group.PREDICT


#: What becomes of requests that belong together: their predictions in order, up to the first whose
#: status is not 200; or the failure of the first that was not answered.
JointAnswer = list[Prediction] | ServeError
OnJointAnswer = Callable[[JointAnswer], None]


class Ticket(Protocol):
    """A request that was taken in."""

    def cancel(self) -> None:
        """Give up waiting: for the answer, or for the rest of a stream. Safe at any time."""


class Admission:
    """Takes requests in for a model version, and keeps account of them until they are answered.

    Args:
        name: Of the model.
        version: Its version.
        settings: Its settings.
        queue: Where its jobs wait.
        batcher: Puts them there.
        workers: Serve them.
        metrics: Where requests are counted.
        max_stream_backlog: Bytes of a streamed answer that may wait for a slow client.

    Attributes:
        settings: To be replaced when they change.
        refusal: Answers every request from now on; None to take requests.
        pending: Jobs taken in and not answered yet.
        is_submitting: Whether a job is on its way into the queue; its answer waits for that.
    """

    def __init__(
        self,
        name: str,
        version: str,
        settings: ModelSettings,
        queue: JobQueue,
        batcher: Batcher,
        workers: WorkerPool,
        metrics: ModelMetrics,
        max_stream_backlog: int,
    ) -> None:
        self.settings = settings
        self.refusal: ServeError | None = None
        self.pending = 0
        self.is_submitting = False
        self.loop = asyncio.get_running_loop()
        self.max_stream_backlog = max_stream_backlog
        self._name = name
        self._version = version
        self._queue = queue
        self._batcher = batcher
        self._workers = workers
        self._metrics = metrics
        self._drained = asyncio.Event()
        self._drained.set()

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        """Queue a request; see the module.

        Raises:
            NoWorker: No worker, or no seat in the queue.
            Overloaded: It could not be answered in time.
            RequestExpired: Its time was over when it had been read.
            ServeError: The model takes no requests.
        """
        if not self._has_room(request.options.priority, 1):
            raise self._refusal_of(request, 1)
        # The server's word to the handler: a client must not order a description for its batch.
        if request.describe:
            request.input.headers["describe"] = "True"
        else:
            request.input.headers.pop("describe", None)
        # In line from now on, though it arrived when its first byte did: a slow upload is no wait.
        queued = time.monotonic()
        timeout = self._timeout_of(request, queued)
        job = _AdmittedJob(self, request, queued, timeout, on_answer)
        try:
            self._batcher.admit(job)
        except Overloaded:
            self._metrics.rejected("overloaded")
            raise
        if timeout < math.inf:  # a timer for each request, only where it was asked for
            job.timer = self._timer(request, timeout, queued, job.fail)
        self._enter(1)
        self.is_submitting = True
        self._batcher.put(job)
        self.is_submitting = False
        if not request.describe:
            job.counters.accepted()
        return job

    def submit_all(self, requests: Sequence[PredictRequest], on_answer: OnJointAnswer) -> Ticket:
        """Queue requests that belong together, all or none; they count as one.

        Args:
            requests: At least one; they differ in nothing but their inputs.
            on_answer: Called once, with the predictions in order. The first (in that order) that
                fails, or has a status other than 200, ends the matter for all of them.

        Raises:
            NoWorker, Overloaded, RequestExpired, ServeError: See `submit`.
        """
        first, count = requests[0], len(requests)
        if not self._has_room(first.options.priority, count):
            raise self._refusal_of(first, count)
        queued = time.monotonic()
        timeout = self._timeout_of(first, queued)
        rows = _AdmittedRows(self, requests, queued, timeout, on_answer)
        self._enter(count)
        self.is_submitting = True
        try:
            self._batcher.put_together(rows.jobs)
        except Overloaded:
            self.release(count)
            self._metrics.rejected("overloaded")
            raise
        finally:
            self.is_submitting = False
        if timeout < math.inf:
            rows.timer = self._timer(first, timeout, queued, rows.fail)
        rows.counters.accepted()
        return rows

    def fail_queued(self) -> None:
        """Answer those in the queue: nobody is left to serve them."""
        for job in self._queue.clear():
            died = WorkerDied(self._last_cause()) if job.crashes else None  # to be run once more
            job.fail(died or self.refusal or self.no_worker())

    async def drain(self, timeout: float) -> None:
        """Wait until every request is answered; at most ``timeout`` seconds.

        Without a worker that is ready nothing can be waited for.
        """
        if self.pending and self._workers.is_working and timeout > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drained.wait(), timeout)

    def no_worker(self, *, by_version: bool = False) -> NoWorker:
        """The refusal of a model that nobody serves."""
        # The stray quote is TorchServe's; clients compare the text.
        version = f' Version {self._version}"' if by_version else ""
        return NoWorker(
            f'Model "{self._name}"{version} has no worker to serve inference request. Please use '
            "scale workers API to add workers. If this is a sequence inference, please check if "
            f"it is closed, or expired; or exceeds maxSequenceJobQueueSize{self._why_no_worker()}"
        )

    # -- of requests that were taken in ------------------------------------------------------------

    def counters_of(self, request: PredictRequest) -> RequestCounters:
        """Where a request is counted."""
        return self._metrics.versioned if request.by_version else self._metrics.unversioned

    def release(self, count: int) -> None:
        """Note that nobody waits for so many jobs any more."""
        self.pending -= count
        if not self.pending:
            self._drained.set()

    def count_unserved(self, error: object) -> None:
        """Count a request that was not served: by the error it was answered with, or None."""
        reason = "no_worker"
        if error is None:
            reason = "client_gone"
        elif isinstance(error, Overloaded):
            reason = "overloaded"
        elif isinstance(error, RequestExpired):
            reason = "expired"
        self._metrics.rejected(reason)

    def discard(self, job: Job) -> None:
        """Take a job out of the queue, if it is there."""
        self._queue.discard(job)

    def handed_over(self, now: float) -> None:
        """An answer that has a deadline is going out."""
        self._batcher.handed_over(now)

    # -- whether there is room, and for how long ---------------------------------------------------

    def _has_room(self, priority: Priority, count: int) -> bool:
        """Whether so many jobs may join the queue now."""
        if self.refusal is not None:
            return False
        has_tickets = not self.settings.use_job_ticket or self._has_tickets(count)
        if self._workers.is_open and self._queue.has_seat(priority, count) and has_tickets:
            return True
        self._metrics.rejected("queue_full" if self._workers.is_open else "no_worker")
        return False

    def _has_tickets(self, count: int) -> bool:
        """Whether a worker waits for a request: each has as many tickets as its batch has seats.

        TorchServe gave one for each worker, so that batches never filled. Where requests join a
        batch on its way, a seat is free until somebody sits on it.
        """
        size = self._batcher.size
        if self.settings.continuous_batching:
            return self.pending + count <= self._workers.ready * size
        return len(self._queue) + count <= self._batcher.idle * size

    def _refusal_of(self, request: PredictRequest, count: int) -> ServeError:
        """Why there is no room for a request of so many jobs."""
        if self.refusal is not None:
            return self.refusal
        if request.describe:
            return NoWorker(
                f'Model "{self._name}" has no worker to serve describe request. Please use scale '
                f"workers API to add workers{self._why_no_worker() or '.'}"
            )
        priority = request.options.priority
        if count == 1 or not self._workers.is_open or self._queue.has_seat(priority, count):
            return self.no_worker(by_version=request.by_version)
        return NoWorker(
            f'The queue of model "{self._name}" has {self._queue.free_seats(priority)} free seats, '
            "and the list has more items. Send fewer at a time, or give it a larger jobQueueSize."
        )

    def _timeout_of(self, request: PredictRequest, queued: float) -> float:
        """Seconds that a request may take, by the client's options and the model's settings.

        Raises:
            RequestExpired: They were over when it had been read; no worker shall get it.
        """
        timeout = min(request.options.timeout, self.settings.client_timeout or math.inf)
        if request.arrived + timeout <= queued:
            self._metrics.rejected("expired")
            raise self._expired(request, timeout)
        return timeout

    def _timer(
        self,
        request: PredictRequest,
        timeout: float,
        queued: float,
        fail: Callable[[ServeError], None],
    ) -> asyncio.TimerHandle:
        """What fails a request when its time is over."""
        left = request.arrived + timeout - queued
        return self.loop.call_later(left, lambda: fail(self._expired(request, timeout)))

    def _expired(self, request: PredictRequest, timeout: float) -> RequestExpired:
        if request.describe:
            return RequestExpired("The handler did not describe its model within responseTimeout.")
        is_models = timeout == self.settings.client_timeout
        name = "clientTimeoutInMills" if is_models else "X-Timeout-Ms"
        return RequestExpired(f"No prediction within {name}={round(timeout * 1000)}.")

    def _enter(self, count: int) -> None:
        self.pending += count
        self._drained.clear()

    def _last_cause(self) -> str:
        failure = self._workers.last_failure
        return "" if failure is None else failure.cause or failure.what

    def _why_no_worker(self) -> str:
        """How the workers failed, to be added to a sentence; nothing where some serve."""
        failure = self._workers.last_failure
        if self._workers.is_open or failure is None:
            return ""
        return f". Its worker has failed: {failure.reason}"


class _AdmittedJob(Job):
    """The job of a request, and what is counted and given back when it is answered."""

    __slots__ = ("_admission", "_received", "counters", "timer")

    def __init__(
        self,
        admission: Admission,
        request: PredictRequest,
        queued: float,
        timeout: float,
        on_answer: OnAnswer,
    ) -> None:
        super().__init__(
            request.input,
            queued,
            on_answer,
            request.group,
            deadline=request.arrived + timeout,
            priority=request.options.priority,
        )
        self._admission = admission
        self._received = request.arrived
        self.counters = admission.counters_of(request)
        self.timer: asyncio.TimerHandle | None = None

    def answer(self, answer: Answer) -> None:
        """See `Job.answer`."""
        on_answer, admission = self.on_answer, self._admission
        if on_answer is None:
            return
        if admission.is_submitting:  # the batcher has refused it at once
            admission.loop.call_soon(self.answer, answer)
            return
        self.on_answer = None
        if type(answer) is Stream:
            self._begin_stream(answer)
        else:
            self._leave(answer)
        on_answer(answer)

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        if self.on_answer is not None:
            self._leave(None)
        super().cancel()

    def _leave(self, answer: Answer | None) -> None:
        """Count the answer, or that nobody waits for it any more."""
        admission = self._admission
        if self.timer is not None:
            self.timer.cancel()
        admission.release(1)
        if self.dispatched is None:
            admission.discard(self)
            admission.count_unserved(answer)
        elif type(answer) is Prediction and self.group is not Group.DESCRIBE:
            now = time.monotonic()
            self.counters.answered(self.dispatched - self.arrived, now - self._received)
            if self.deadline < math.inf:
                admission.handed_over(now)

    def _begin_stream(self, stream: Stream) -> None:
        """Its first piece was in time, however long the rest takes."""
        if self.timer is not None:
            self.timer.cancel()
        assert self.dispatched is not None
        stream.most_waiting = self._admission.max_stream_backlog
        # Not a method of this job: it holds the stream.
        waited = self.dispatched - self.arrived
        stream.on_close = partial(
            _count_stream, self._admission, self.counters, self._received, waited
        )


def _count_stream(
    admission: Admission,
    counters: RequestCounters,
    received: float,
    waited: float,
    complete: bool,
) -> None:
    admission.release(1)
    if complete:
        counters.answered(waited, time.monotonic() - received)


class _AdmittedRows:
    """The jobs of requests that belong together."""

    __slots__ = (
        "_admission",
        "_early",
        "_on_answer",
        "_predictions",
        "_queued",
        "_received",
        "counters",
        "jobs",
        "timer",
    )

    def __init__(
        self,
        admission: Admission,
        requests: Sequence[PredictRequest],
        queued: float,
        timeout: float,
        on_answer: OnJointAnswer,
    ) -> None:
        first = requests[0]
        group, priority, deadline = first.group, first.options.priority, first.arrived + timeout
        self._admission = admission
        self._predictions: list[Prediction] = []
        #: Answers to jobs, by place, that have come before those of the jobs ahead.
        self._early: dict[int, Answer] = {}
        self._on_answer: OnJointAnswer | None = on_answer
        self._queued = queued
        self._received = first.arrived
        self.counters = admission.counters_of(first)
        self.timer: asyncio.TimerHandle | None = None
        self.jobs = [
            Job(
                request.input,
                queued,
                partial(self._note, place),
                group,
                deadline=deadline,
                priority=priority,
            )
            for place, request in enumerate(requests)
        ]

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        if self._on_answer is not None:
            self._end(None)

    def fail(self, error: ServeError) -> None:
        """Answer with a failure."""
        if self._on_answer is not None:
            self._end(error)

    def _note(self, place: int, answer: Answer) -> None:
        """Take the answer to one of the jobs."""
        if self._admission.is_submitting:  # the batcher has refused it at once
            self._admission.loop.call_soon(self._note, place, answer)
            return
        self._early[place] = answer
        predictions = self._predictions
        while self._on_answer is not None and len(predictions) in self._early:
            answer = self._early.pop(len(predictions))
            if type(answer) is Stream:
                answer = ServeError("The model answers in pieces; such answers make no list.")
            if isinstance(answer, ServeError):
                self._end(answer)
                return
            assert isinstance(answer, Prediction)
            predictions.append(answer)
            if answer.status != 200 or len(predictions) == len(self.jobs):
                self._end(predictions)

    def _end(self, answer: JointAnswer | None) -> None:
        """Count the answer and pass it on, if there is one; nobody waits for the jobs any more."""
        on_answer, self._on_answer = self._on_answer, None
        admission, jobs = self._admission, self.jobs
        if self.timer is not None:
            self.timer.cancel()
        for job in jobs:
            job.cancel()
            admission.discard(job)
        admission.release(len(jobs))
        if jobs[0].dispatched is None:
            admission.count_unserved(answer)
        elif isinstance(answer, list):
            waited = max(job.dispatched or self._queued for job in jobs) - self._queued
            self.counters.answered(waited, time.monotonic() - self._received)
        if answer is not None and on_answer is not None:
            on_answer(answer)
