"""What one model version knows of requests that fail; its batcher and all its workers share it."""

import time
from collections.abc import Callable

from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.batching.isolation.failed_contents import FailedContents
from marserve.frontend.batching.isolation.failure_rate import FailureRate
from marserve.frontend.batching.isolation.hints import Hints
from marserve.frontend.batching.jobs import Group, Job

# Reasons of runs that tell nothing of the share of failing requests in ordinary batches.
_APART = (Reason.SUSPECTED, Reason.ALONE)


class FailureIsolation:
    """Learns from failures, so that those of one request do not become those of others.

    Attributes:
        contents: What has failed alone; added to by `remember`.
        rate: How many of the requests in ordinary batches fail.
        hints: How good the hints of tracebacks are.
        is_alert: Whether anything is known of failures; while there is not, nothing needs to be
            told or asked.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.contents = FailedContents(clock)
        self.rate = FailureRate()
        self.hints = Hints()
        self.is_alert = False

    def remember(self, job: Job, *, crashes: bool = False) -> None:
        """Have a job's content run alone when it is sent again."""
        self.contents.add(job, crashes=crashes)
        self.is_alert = True

    def succeeded(self, batch: Batch) -> None:
        """Note that a batch, or a part of one, was answered."""
        if batch.reason is Reason.SUSPECTED:
            self.contents.discard(batch.jobs[0])
        if batch.reason not in _APART and batch.jobs[0].group is not Group.DESCRIBE:
            self.rate.succeeded(len(batch))
        self.contents.forget_expired()
        self.is_alert = bool(self.contents) or not self.rate.is_quiet

    def run_failed(self, batch: Batch, seconds: float) -> None:
        """Note that a batch, or a part of one, got an error."""
        if batch.reason not in _APART and batch.jobs[0].group is not Group.DESCRIBE:
            self.rate.run_failed(seconds / batch.predicted if batch.predicted else 1.0)
            self.is_alert = True

    def request_failed(self, job: Job, reason: Reason) -> None:
        """Note that a job is the cause of its failure; ``reason`` is that of its batch."""
        if job.group is Group.DESCRIBE:
            return
        if reason not in _APART:
            self.rate.request_failed()
        if not self.rate.fails_for_all:
            self.remember(job)
