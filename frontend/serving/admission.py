"""Admission: accept a request into a model's queue, or refuse it with the error for the client.

It checks the capacity of the queue, job tickets, and the request's deadline.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from urllib.parse import quote

from marserve.frontend.batching.jobs import Group, Job, OnAnswer, Priority
from marserve.frontend.errors import (
    ListTooLong,
    NoWorker,
    Overloaded,
    QueueFull,
    RequestExpired,
    ServeError,
    ServerStopping,
    WorkerDied,
    retry_after,
)
from marserve.frontend.serving.long_lists import LongLists
from marserve.frontend.serving.predict_request import (
    OnJointAnswer,
    PendingJob,
    PendingRequests,
    PredictRequest,
    Ticket,
    group_of,
)
from marserve.frontend.serving.request_rows import MAX_ROWS, PendingRows, Rows
from marserve.frontend.serving.worker_pool import WorkerPool
from marserve.frontend.settings.model_settings import ModelSettings


class Admission:
    """Accepts requests into the queue of one model version, or refuses them."""

    def __init__(
        self, settings: ModelSettings, workers: WorkerPool, pending: PendingRequests
    ) -> None:
        self.settings = settings  # replaced when they change
        #: Makes the error for every request; None while they are accepted.
        self.refusal: Callable[[], ServeError] | None = None
        self._workers = workers
        self._pending = pending
        self._batcher, self._metrics = pending.batcher, pending.metrics
        self._queue = pending.batcher.queue
        self._lists = LongLists(pending)
        self._loop = asyncio.get_running_loop()

    @property
    def share_taken(self) -> float:
        """The used share of the queue's capacity; 1 or more if it is full."""
        if self.settings.use_job_ticket and not self._has_job_tickets(1):
            return 1.0
        return self._queue.share_taken(Priority.NORMAL)

    @property
    def unqueued_rows(self) -> int:
        """Number of rows of accepted lists that are not queued yet."""
        return self._lists.unqueued

    @property
    def max_rows(self) -> int:
        """The largest number of rows of a request."""
        return max(MAX_ROWS, self._queue.capacity)

    def check(self, request: PredictRequest) -> None:
        """Raise what `submit` would raise now."""
        self._check(request)

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        """Queue a request, or raise the error for the client."""
        queued, timeout = self._check(request)
        job = PendingJob(
            request.input,
            queued,
            on_answer,
            group_of(request, request.input),
            deadline=request.arrived + timeout,
            priority=request.options.priority,
            pending=self._pending,
            request_arrived=request.arrived,
            counters=self._pending.counters_of(request),
            nested_in=request.nested_in,
            trace=request.trace,
        )
        self._put((job,), request)
        self._pending.jobs += 1
        self._take_in(job, queued, request, timeout)
        return job

    def submit_all(self, request: PredictRequest, rows: Rows, on_answer: OnJointAnswer) -> Ticket:
        """Queue the rows of a request, or a piece of them, and the others later (`LongLists`)."""
        count, priority = len(rows.jobs), request.options.priority
        if count > self.max_rows:
            error = ListTooLong(self.max_rows)
            raise self._refused(request, error, "too_long")
        queued, timeout = self._check(request)
        size, lists = count, self._lists
        if count > lists.half(priority) or not self.has_room(priority, count):
            if lists.is_full(priority):
                raise self._without_room(request)
            size = lists.size_of_first_piece(priority)
        self._batcher.has_rows = True
        deadline = request.arrived + timeout
        goal = self._batcher.batching.max_latency
        if goal and rows.jobs[0].group is Group.PREDICT:
            deadline = min(deadline, queued + goal)  # later pieces have no later one
        pending = PendingRows(self._pending, request, rows, queued, deadline, on_answer)
        first = pending.next_jobs(size, queued)
        try:
            if first:
                self._put(first, request, pending.unqueued)
        except ServeError:
            pending.release()
            raise
        self._take_in(pending, queued, request, timeout)
        if pending.unqueued:
            lists.add(pending, first, priority)
        return pending

    def fail_queued(self) -> None:
        """Fail all queued requests, because no worker is left to serve them."""
        failure = self._workers.last_failure
        cause = "" if failure is None else failure.cause or failure.what
        for job in self._queue.clear():
            died = WorkerDied(cause) if job.crashes else None  # it waited for a retry
            job.fail(died or (self.refusal or self.no_worker)())
        self._lists.fail(self.refusal or self.no_worker)

    async def drain(self, timeout: float) -> None:
        """Wait until every request is answered, at most ``timeout`` seconds.

        Return at once if no worker is ready or restarting.
        """
        if self._workers.is_working and timeout > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._pending.drained()

    def no_worker(self, *, by_version: bool = False) -> NoWorker:
        """Return the error for a request to a model without a working worker."""
        # The stray quote is TorchServe's; clients compare the text.
        version = f' Version {self._metrics.version}"' if by_version else ""
        return NoWorker(
            f'Model "{self._metrics.name}"{version} has no worker to serve inference request. '
            "Please use scale workers API to add workers. If this is a sequence inference, please "
            "check if it is closed, or expired; or exceeds maxSequenceJobQueueSize",
            self._why_no_worker(),
        )

    def has_room(self, priority: Priority, jobs: int = 1) -> bool:
        """Return whether a worker is there, and the queue has capacity for this number of jobs."""
        has_tickets = not self.settings.use_job_ticket or self._has_job_tickets(jobs)
        return self._workers.is_open and has_tickets and self._queue.has_capacity(priority, jobs)

    def _check(self, request: PredictRequest) -> tuple[float, float]:
        """Return the moment at which a request is queued, and its timeout after its arrival.

        Raises:
            ServeError: The request is refused.
        """
        if self.refusal is not None and not (request.continues and self.refusal is ServerStopping):
            raise self.refusal()
        if not self.has_room(request.options.priority):
            raise self._without_room(request)
        # `arrived` is the first byte's time; the queue time starts now, after the upload.
        queued = time.monotonic()
        timeout = min(request.options.timeout, self.settings.client_timeout or math.inf)
        if request.arrived + timeout <= queued:  # expired during the upload
            error = self._expired(request, timeout)
            raise self._refused(request, error, "expired")
        return queued, timeout

    def _without_room(self, request: PredictRequest) -> ServeError:
        is_open = self._workers.is_open
        refusal = self._refusal_of(request)
        if is_open:
            expected = self._batcher.deadline_admission.expected_seconds()
            refusal.retry_after = retry_after(expected)
        return self._refused(request, refusal, "queue_full" if is_open else "no_worker")

    def _put(self, jobs: Sequence[Job], request: PredictRequest, behind: int = 0) -> None:
        try:
            self._batcher.put(*jobs, behind=behind)
        except Overloaded as error:
            self._refused(request, error, "overloaded")
            raise

    def _refused(self, request: PredictRequest, error: ServeError, reason: str) -> ServeError:
        """Record a refused request; return the error.

        Callers raise the result, not a variable: a frame that refers to its error is a cycle.
        """
        self._metrics.rejected(reason)
        now = time.monotonic()
        lines = self._pending.lines
        lines.refused(
            request.input.id, request.arrived, now, error.status, error.reason, request.trace
        )
        return error

    def _take_in(
        self,
        ticket: PendingJob | PendingRows,
        queued: float,
        request: PredictRequest,
        timeout: float,
    ) -> None:
        if timeout < math.inf:  # only requests with a timeout need a timer
            left = request.arrived + timeout - queued
            ticket.timer = self._loop.call_later(
                left, lambda: ticket.expire(self._expired(request, timeout))
            )
        if not request.describe:
            ticket.counters.accepted()

    def _refusal_of(self, request: PredictRequest) -> NoWorker:
        if request.describe:
            refusal = NoWorker(
                f'Model "{self._metrics.name}" has no worker to serve describe request. Please use '
                "scale workers API to add workers.",
                self._why_no_worker(),
            )
        else:
            refusal = self.no_worker(by_version=request.by_version)
        if not self._workers.is_open:
            return refusal
        return self._full(refusal, self._why_full(request))

    def _full(self, refusal: NoWorker, why: str) -> QueueFull:
        return QueueFull(refusal.message, why)

    def _why_full(self, request: PredictRequest) -> str:
        ready = self._workers.ready
        workers = f"{ready} busy worker{'' if ready == 1 else 's'}" if ready else "a loading worker"
        if self._free(request):
            return f"useJobTicket is set, and the model has {workers} and no idle one."
        count = len(self._queue)
        return (
            f"The queue is full: {count} requests wait for {workers}. Try again later, add "
            f"workers, or set a larger {self._size_setting}."
        )

    def _free(self, request: PredictRequest) -> int:
        return self._queue.free_capacity(request.options.priority)

    @property
    def _size_setting(self) -> str:
        return (
            f"jobQueueSize ({self._queue.capacity}) in model-config.yaml or with PUT "
            f"/models/{quote(self._metrics.name)}?job_queue_size=NUMBER"
        )

    def _has_job_tickets(self, jobs: int) -> bool:
        """Return whether job tickets are left; each idle worker has one for each row of its batch.

        TorchServe has one per worker, so that its batches never fill. With continuous batching
        requests join a running batch, so the free rows of busy workers count too.
        """
        size = self._batcher.size
        if self.settings.continuous_batching:
            return self._pending.jobs + jobs <= self._workers.ready * size
        return len(self._queue) + jobs <= self._batcher.workers.idle * size

    def _why_no_worker(self) -> str:
        """Return why the workers failed; an empty text while some are working."""
        failure = self._workers.last_failure
        if self._workers.is_open or failure is None:
            return ""
        return f"Its worker has failed: {failure.reason}"

    def _expired(self, request: PredictRequest, timeout: float) -> RequestExpired:
        is_models = timeout == self.settings.client_timeout
        if request.describe and not is_models:
            return RequestExpired("The handler did not describe its model within responseTimeout.")
        milliseconds = round(timeout * 1000)
        if request.continues and not is_models:  # no client has chosen its timeout
            return RequestExpired(f"No prediction within {milliseconds} ms.")
        name = "clientTimeoutInMills" if is_models else "X-Timeout-Ms"
        return RequestExpired(f"No prediction within {name}={milliseconds}.")
