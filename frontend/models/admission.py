"""Whether a model takes a request: seats, job tickets, deadlines, and the words of its refusals."""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence

from marserve.frontend.batching.jobs import Job, OnAnswer
from marserve.frontend.errors import NoWorker, Overloaded, RequestExpired, ServeError, WorkerDied
from marserve.frontend.models.predict_request import (
    OnJointAnswer,
    PendingJob,
    PendingRequests,
    PendingRows,
    PredictRequest,
    Ticket,
    group_of,
)
from marserve.frontend.models.settings.model_settings import ModelSettings
from marserve.frontend.models.worker_pool import WorkerPool


class Admission:
    """Lets requests into the queue of a model version, or refuses them.

    Attributes:
        settings: To be replaced when they change.
        refusal: Answers every request; None to let requests in.
    """

    def __init__(
        self, settings: ModelSettings, workers: WorkerPool, pending: PendingRequests
    ) -> None:
        self.settings = settings
        self.refusal: ServeError | None = None
        self._workers = workers
        self._pending = pending
        self._queue, self._batcher, self._metrics = pending.queue, pending.batcher, pending.metrics
        self._loop = asyncio.get_running_loop()

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        """See `ModelVersion.submit`."""
        queued, timeout = self._check(request, 1)
        job = PendingJob(
            request.input,
            queued,
            on_answer,
            group_of(request),
            deadline=request.arrived + timeout,
            priority=request.options.priority,
            pending=self._pending,
            request_arrived=request.arrived,
            counters=self._pending.counters_of(request),
        )
        self._take_in(job, (job,), request, timeout)
        return job

    def submit_all(self, requests: Sequence[PredictRequest], on_answer: OnJointAnswer) -> Ticket:
        """See `ModelVersion.submit_all`."""
        first = requests[0]
        queued, timeout = self._check(first, len(requests))
        rows = PendingRows(self._pending, requests, queued, first.arrived + timeout, on_answer)
        self._take_in(rows, rows.jobs, first, timeout)
        return rows

    def fail_queued(self) -> None:
        """Answer those in the queue: nobody is left to serve them."""
        failure = self._workers.last_failure
        cause = "" if failure is None else failure.cause or failure.what
        for job in self._queue.clear():
            died = WorkerDied(cause) if job.crashes else None  # it was to be run once more
            job.fail(died or self.refusal or self.no_worker())

    async def drain(self, timeout: float) -> None:
        """Wait until every request is answered; at most ``timeout`` seconds.

        Without a worker that is ready nothing can be waited for.
        """
        if self._workers.is_working and timeout > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._pending.drained()

    def no_worker(self, *, by_version: bool = False) -> NoWorker:
        """The refusal of a model that nobody serves."""
        # The stray quote is TorchServe's; clients compare the text.
        version = f' Version {self._metrics.version}"' if by_version else ""
        return NoWorker(
            f'Model "{self._metrics.name}"{version} has no worker to serve inference request. '
            "Please use scale workers API to add workers. If this is a sequence inference, please "
            "check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
            f"{self._why_no_worker()}"
        )

    def _check(self, request: PredictRequest, jobs: int) -> tuple[float, float]:
        """Make sure that a request of so many jobs may join the queue now.

        Returns:
            The moment from which it waits, and the seconds since its arrival that it may take.

        Raises:
            ServeError: It may not.
        """
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)  # one for all: without the frames of others
        priority, is_open = request.options.priority, self._workers.is_open
        has_tickets = not self.settings.use_job_ticket or self._has_job_tickets(jobs)
        if not (is_open and has_tickets and self._queue.has_seat(priority, jobs)):
            self._metrics.rejected("queue_full" if is_open else "no_worker")
            raise self._refusal_of(request, jobs)
        # It waits from now on, though it arrived when its first byte did: a slow upload is no wait.
        queued = time.monotonic()
        timeout = min(request.options.timeout, self.settings.client_timeout or math.inf)
        if request.arrived + timeout <= queued:  # no worker shall get what is over already
            self._metrics.rejected("expired")
            raise self._expired(request, timeout)
        return queued, timeout

    def _take_in(
        self,
        ticket: PendingJob | PendingRows,
        jobs: Sequence[Job],
        request: PredictRequest,
        timeout: float,
    ) -> None:
        try:
            self._batcher.put(*jobs)
        except Overloaded:
            self._metrics.rejected("overloaded")
            raise
        self._pending.jobs += len(jobs)
        if timeout < math.inf:  # a timer for each request, only where it was asked for
            left = request.arrived + timeout - jobs[0].arrived
            ticket.timer = self._loop.call_later(
                left, lambda: ticket.fail(self._expired(request, timeout))
            )
        if not request.describe:
            ticket.counters.accepted()

    def _refusal_of(self, request: PredictRequest, jobs: int) -> NoWorker:
        name, priority = self._metrics.name, request.options.priority
        if request.describe:
            return NoWorker(
                f'Model "{name}" has no worker to serve describe request. Please use scale '
                f"workers API to add workers{self._why_no_worker() or '.'}"
            )
        if jobs > 1 and self._workers.is_open and not self._queue.has_seat(priority, jobs):
            return NoWorker(
                f'The queue of model "{name}" has {self._queue.free_seats(priority)} free seats, '
                "and the list has more items. Send fewer at a time, or give it a larger "
                "jobQueueSize."
            )
        return self.no_worker(by_version=request.by_version)

    def _has_job_tickets(self, jobs: int) -> bool:
        """Whether a worker waits for a request: each has as many tickets as its batch has seats.

        TorchServe gave one for each worker, so that batches never filled. Where requests join a
        batch on its way, a seat is free until somebody sits on it.
        """
        size = self._batcher.size
        if self.settings.continuous_batching:
            return self._pending.jobs + jobs <= self._workers.ready * size
        return len(self._queue) + jobs <= self._batcher.workers.idle * size

    def _why_no_worker(self) -> str:
        """How the workers failed, to be added to a sentence; nothing where some serve."""
        failure = self._workers.last_failure
        if self._workers.is_open or failure is None:
            return ""
        return f". Its worker has failed: {failure.reason}"

    def _expired(self, request: PredictRequest, timeout: float) -> RequestExpired:
        is_models = timeout == self.settings.client_timeout
        if request.describe and not is_models:
            return RequestExpired("The handler did not describe its model within responseTimeout.")
        name = "clientTimeoutInMills" if is_models else "X-Timeout-Ms"
        return RequestExpired(f"No prediction within {name}={round(timeout * 1000)}.")
