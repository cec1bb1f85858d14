"""What a model version learns from requests that fail; its batcher and its workers share it."""

import math
import time
from collections.abc import Callable

from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.batching.compiled_sizes import CompiledSizes
from marserve.frontend.batching.isolation.failed_contents import FailedContents
from marserve.frontend.batching.isolation.failure_rate import (
    FailureRate,
    Failures,
    candidates,
    cheapest_size,
)
from marserve.frontend.batching.isolation.hints import Hints
from marserve.frontend.batching.jobs import Group, Job
from marserve.frontend.batching.learning.costs import Costs
from marserve.frontend.batching.options import Batching

# After this many batches that failed, and none of their requests alone, their size is the cause.
_FAILED_TOGETHER = 8
# Runs for these reasons do not count for the share of failing requests in ordinary batches.
_APART = (Reason.SUSPECTED, Reason.ALONE)


class FailureIsolation:
    """Learns from failures which requests should not share batches, and how large these may be."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = FailureRate()
        self.hints = Hints()
        #: Whether there were failures lately; else nothing needs to be noted nor looked up.
        self.is_alert = False
        #: Contents that run alone, because they have failed alone.
        self.contents = FailedContents(clock)
        #: The smallest size of batches that failed, and none of their requests alone; infinite
        #: after `size_succeeded`. And how many there were.
        self.fails_from = math.inf
        self._failed_together = 0

    def remember(self, job: Job, *, crashes: bool = False) -> None:
        """Let a job's content run alone when it is sent again."""
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

    def failed_together(self, size: int) -> int:
        """Note that batches of this size failed, and none of the requests alone.

        Return the size of batches that fail because of their size; 0 while that is not certain.
        """
        self.fails_from = min(self.fails_from, size)
        self._failed_together += 1
        if self._failed_together < _FAILED_TOGETHER:
            return 0
        found = int(self.fails_from)
        self.size_succeeded()
        return found

    def size_succeeded(self) -> None:
        """Note that a batch of the size `fails_from` or more was answered."""
        self.fails_from, self._failed_together = math.inf, 0

    def request_failed(self, job: Job, reason: Reason) -> None:
        """Note that a job is the cause of its failure; ``reason`` is that of its batch."""
        if job.group is Group.DESCRIBE:
            return
        if reason not in _APART:
            self.rate.request_failed()
        if not self.rate.fails_for_all:
            self.remember(job)

    def cheapest_size(self, batching: Batching, costs: Costs, share: float) -> int:
        """Return the largest batch size that is cheap where this share of the requests fails."""
        compiled = batching.compiled_sizes
        failures = Failures(share, self.hints.hinted, self.hints.checked, self.rate.cost)
        padded = CompiledSizes(compiled, costs) if compiled else costs
        return cheapest_size(candidates(batching.max_size, compiled), padded, failures)
