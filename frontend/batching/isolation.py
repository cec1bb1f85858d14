"""Splitting of failed batches, so that only the requests that cause the failure fail.

The halves of the batch are run, then the halves of a half that failed, and so on down to single
requests, which get their own error.

One bad request among n costs up to 2·⌈log2 n⌉ further runs with 2·n rows in all, which could be
used to keep a server busy. So there are limits (`BatchSplitting`, `RetryBudget`); beyond them a
request gets the error of the last batch it was in, as all do in TorchServe.
"""

from collections.abc import Sequence
from typing import NamedTuple

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import ServeError

# As multiples of ⌈log2 n⌉: the runs to isolate failing jobs (one needs 2, two need 4 at most), and
# how many runs may fail before the first success.
_MAX_RUNS = 4
_MAX_RUNS_IN_VAIN = 2
# The share of a model's running time that isolation may take; and its credit in seconds, at the
# start and at most.
_SHARE = 0.1
_FIRST_CREDIT = 5.0
_MAX_CREDIT = 30.0


class Part(NamedTuple):
    """Jobs of a failed batch that will be run again, and the error of that batch."""

    jobs: Sequence[Job]
    reason: Reason
    error: ServeError


class BatchSplitting:
    """Splits one failed batch down to the failing items; pure.

    Until a part has succeeded, the smallest part runs next: that shows soonest, with the fewest
    rows, whether any can succeed. From then on the largest part runs next, because most of its jobs
    are good and wait. If nothing succeeds, splitting ends after 2·⌈log2 n⌉ runs, with hardly more
    rows than the batch had.

    Parts that ran out of memory are halved for as long as that helps: those runs are the work
    itself in pieces that fit, at most 2·n-2 of them; the next batch is no larger than what was
    found to fit (`too_large`).

    Args:
        size: Number of jobs of the batch.
        isolates: If false, only parts that ran out of memory are run again, and all other jobs get
            the error of their batch.

    Attributes:
        runs: How many parts were run so far.
    """

    def __init__(self, size: int, *, isolates: bool = True) -> None:
        levels = (size - 1).bit_length()  # ⌈log2 size⌉
        self.runs = 0
        self._max_runs = _MAX_RUNS * levels
        self._max_in_vain = _MAX_RUNS_IN_VAIN * levels
        self._isolates = isolates
        self._pending: list[Part] = []
        self._has_succeeded = False
        self._smallest_too_large = 0
        self._is_too_large_alone = False

    @property
    def waiting(self) -> list[Job]:
        """Jobs that are still to be run again."""
        return [job for part in self._pending for job in part.jobs]

    @property
    def too_large(self) -> int:
        """The smallest number of rows that ran out of memory while fewer did not; 0 for none.

        Also 0 if a single request ran out of memory: then the request is the cause, not the size.
        """
        is_known = self._has_succeeded and not self._is_too_large_alone
        return self._smallest_too_large if is_known else 0

    def failed(self, jobs: Sequence[Job], error: ServeError, reason: Reason, run_as: int) -> None:
        """Note that the batch, or a part of it, failed.

        A job that ran alone fails, and so does one whose answer has begun to stream. The others
        will be run again in two halves.
        """
        if reason is Reason.OUT_OF_MEMORY:
            if len(jobs) == 1:
                self._is_too_large_alone = True
            else:
                self._smallest_too_large = min(self._smallest_too_large or run_as, run_as)
        left = []
        for job in jobs:
            if len(jobs) > 1 and job.stream is None:
                left.append(job)
            else:
                job.fail(error)
        middle = len(left) // 2
        for half in (left[middle:], left[:middle]):
            if half:
                self._pending.append(Part(half, reason, error))

    def succeeded(self) -> None:
        """Note that a part was answered."""
        self._has_succeeded = True

    def next_part(self) -> Part | None:
        """Return the part to run next, without cancelled jobs; None when all jobs are answered.

        Jobs of parts that are not worth another run fail here.
        """
        while self._pending:
            part = self._pop()
            jobs = [job for job in part.jobs if job.is_open]
            if jobs and self._is_worth_running(part.reason):
                self.runs += 1
                return part._replace(jobs=jobs)
            for job in jobs:
                job.fail(part.error)
        return None

    def _pop(self) -> Part:
        pending = self._pending
        if not self._has_succeeded:
            return pending.pop()  # the half of a half was put in last
        return pending.pop(max(range(len(pending)), key=lambda at: (len(pending[at].jobs), at)))

    def _is_worth_running(self, reason: Reason) -> bool:
        if not self._has_succeeded and self.runs >= self._max_in_vain:
            return False
        is_within_bounds = self._isolates and self.runs < self._max_runs
        return is_within_bounds or reason is Reason.OUT_OF_MEMORY


class RetryBudget:
    """Limits isolation to a tenth of a model's running time; pure.

    Otherwise one bad request per batch would cut a server's throughput to a third. A split that has
    begun is finished on credit, which batches must earn back before the next split.
    """

    def __init__(self) -> None:
        self._credit = _FIRST_CREDIT

    @property
    def has_credit(self) -> bool:
        """Whether the next batch that fails may be split."""
        return self._credit > 0.0

    def earn(self, seconds: float) -> None:
        """Add to the credit for a batch that ran this long."""
        self._credit = min(self._credit + _SHARE * seconds, _MAX_CREDIT)

    def spend(self, seconds: float) -> None:
        """Subtract from the credit for a part of a failed batch that ran this long."""
        self._credit -= seconds
