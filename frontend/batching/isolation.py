"""A batch that failed is split, so that only the requests that are to blame fail.

The halves of the batch are run, the halves of a half that failed, and so on down to single
requests, whose error is then their own.

One bad request among n costs 2·⌈log2 n⌉ runs more, of 2·n rows together: a lever for whoever wants
to keep a server busy. So there are bounds (`BatchSplitting`, `RetryBudget`); beyond them a request
gets the error of the batch it was last in, which is what TorchServe gives to all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import ServeError

# Of ⌈log2 n⌉: runs to isolate the bad ones of a batch (one needs 2, two need 4 at most), and how
# many of them may fail before the first success.
_MAX_RUNS = 4
_MAX_RUNS_IN_VAIN = 2
# Of the time that a model runs, what isolation may take; and the credit in seconds that it begins
# with and saves up at most.
_SHARE = 0.1
_FIRST_CREDIT = 5.0
_MAX_CREDIT = 30.0


class Part(NamedTuple):
    """Jobs of a failed batch that are to be run once more, and what that batch failed with."""

    jobs: Sequence[Job]
    reason: Reason
    error: ServeError


class BatchSplitting:
    """One failed batch on its way down to the failing items; pure.

    Until something has succeeded the smallest part goes first: that finds out soonest, and with the
    fewest rows, whether anything can. From then on the largest does: most of those in it are
    innocent and wait. Where nothing at all succeeds, it ends after 2·⌈log2 n⌉ runs, of hardly more
    rows than the batch had.

    What failed for want of memory is halved for as long as that helps: those runs are the work
    itself in pieces that fit, at most 2·n-2 of them; the next batch is no larger than what was
    found to fit (`too_large`).

    Unless it ``isolates``, only what failed for want of memory is run again, and the rest gets the
    error of the batch; ``size`` is its jobs, and ``runs`` are the parts that were handed out.
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
        """Jobs that have yet to be run again."""
        return [job for part in self._pending for job in part.jobs]

    @property
    def too_large(self) -> int:
        """Rows that needed more memory than there is, and fewer did not; 0 for none.

        Also 0 where a request needed it all by itself: then it is to blame, not the size.
        """
        is_known = self._has_succeeded and not self._is_too_large_alone
        return self._smallest_too_large if is_known else 0

    def failed(self, jobs: Sequence[Job], error: ServeError, reason: Reason, run_as: int) -> None:
        """Note that the batch, or a part of it, failed.

        A single job is to blame, and fails; so does one whose answer has begun. The others will be
        run again in two halves, for this reason.
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
        """The part that is to be run now, without those that nobody waits for any more.

        None when all jobs are answered; those that are not worth another run fail before that.
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
    """Keeps isolation to a tenth of the time that a model runs; pure.

    Else whoever sends one bad request per batch would cut a server's throughput to a third. What
    has begun is finished on credit; batches have to earn that back before the next one begins.
    """

    def __init__(self) -> None:
        self._credit = _FIRST_CREDIT

    @property
    def has_credit(self) -> bool:
        """Whether the next batch that fails may be split."""
        return self._credit > 0.0

    def earn(self, seconds: float) -> None:
        """Note that a batch ran for so long."""
        self._credit = min(self._credit + _SHARE * seconds, _MAX_CREDIT)

    def spend(self, seconds: float) -> None:
        """Note that a part of a failed batch ran for so long."""
        self._credit -= seconds
