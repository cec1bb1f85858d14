"""Splits failed batches, so that only the requests that cause the failure fail.

The halves of the batch are run, then the halves of a half that failed, and so on down to single
requests, which get their own error. Where a hint names the failing request (`hints`), that one is
run alone and the others together. One bad request among n costs up to 2·⌈log2 n⌉ further runs, or
two with a hint; many cost at most 2·n, and then batches become smaller (`failure_rate`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from marserve.backend.metrics import Row, is_about
from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.isolation.failure_isolation import FailureIsolation
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import ServeError

# How many runs may fail before the first success, as multiples of ⌈log2 n⌉; and where memory ran
# out, since fewer rows help soon or never.
_MAX_RUNS_IN_VAIN = 4
_MAX_HALVINGS_IN_VAIN = 2
# Where more requests fail than this share, a line that names any row would often be right.
_MAX_SHARE_BELIEVED = 0.5
# How many requests of a batch are tried alone while the model fails for all.
_PROBES = 2


class Hint(NamedTuple):
    """The request that a traceback names as the cause, and the line that raised."""

    suspect: Job
    line: str


@dataclass(slots=True, eq=False)
class Failure:
    """The error of a run, and the metrics that the handler reported before it failed."""

    error: ServeError
    rows: list[Row]


@dataclass(slots=True, eq=False)
class Part:
    """Jobs of a failed batch that will be run again, and the failure of that batch."""

    jobs: Sequence[Job]
    reason: Reason
    failure: Failure
    twin: "Part | None" = None  # the other part, if the failed batch consisted of these two
    fails: bool = False  # whether it is known to fail as a whole


class BatchSplitting:
    """Splits one failed batch down to the failing requests.

    Until a part has succeeded, the smallest part runs next: that shows soonest whether any can
    succeed. From then on the largest part runs next, because most of its jobs are good. If nothing
    succeeds, splitting ends after 4·⌈log2 n⌉ runs; while the model fails for all requests
    (`FailureRate.fails_for_all`), after two single requests.

    Parts that ran out of memory are halved as long as that helps, in at most 2·n-2 runs. Unless it
    ``isolates``, only these are run again. ``runs`` is the number of parts that were run so far.

    The handler's metrics of a job are those of its last run: ``report`` gets those of a failed run
    when a job fails without another. Metrics of no request are reported with the first such job.
    """

    def __init__(
        self,
        size: int,
        isolation: FailureIsolation,
        report: Callable[[list[Row]], None],
        *,
        isolates: bool = True,
    ) -> None:
        levels = (size - 1).bit_length()  # ⌈log2 size⌉
        self.runs = 0
        self._isolation = isolation
        self._report = report
        self._max_in_vain = _MAX_RUNS_IN_VAIN * levels
        self._max_halvings_in_vain = _MAX_HALVINGS_IN_VAIN * levels
        self._isolates = isolates
        self._pending: list[Part] = []
        self._running: Part | None = None
        self._hinted: dict[Job, str] = {}
        self._has_succeeded = False
        self._smallest_too_large = self._smallest_failed = 0
        self._has_failed = False
        self._is_too_large_alone = False

    @property
    def waiting(self) -> list[Job]:
        """Jobs that will be run again."""
        return [job for part in self._pending for job in part.jobs]

    @property
    def too_large(self) -> int:
        """The smallest number of rows that ran out of memory while fewer did not; 0 for none.

        Also 0 if a single request ran out of memory: then the request is the cause, not the size.
        """
        is_known = self._has_succeeded and not self._is_too_large_alone
        return self._smallest_too_large if is_known else 0

    @property
    def fails_together(self) -> int:
        """The smallest size that failed, if no request failed alone; 0 for none."""
        is_known = self._has_succeeded and not self._has_failed
        return self._smallest_failed if is_known else 0

    def failed(
        self,
        jobs: Sequence[Job],
        failure: Failure,
        reason: Reason,
        run_as: int,
        hint: Hint | None = None,
    ) -> None:
        """Note that the batch, or a part of it, failed.

        A job that ran alone fails, and so does one that has already streamed a piece of its answer.
        The others will be run again, in two halves or by the hint.
        """
        if len(jobs) == 1:
            self._note_alone(jobs[0], reason, hint)
        elif reason is Reason.OUT_OF_MEMORY:
            self._smallest_too_large = min(self._smallest_too_large or run_as, run_as)
        else:
            self._smallest_failed = min(self._smallest_failed or run_as, run_as)
        left = [job for job in jobs if len(jobs) > 1 and job.stream is None]
        self._fail([job for job in jobs if len(jobs) == 1 or job.stream is not None], failure)
        if reason is Reason.ISOLATION and self._isolation.rate.fails_for_all:
            left.sort(key=lambda job: hint is None or job is not hint.suspect)
            probes = ([job] for job in left[-_PROBES:])
            self._push(reason, failure, left[:-_PROBES], *probes)
        elif not self._follow(hint, left, reason, failure):
            # They are all there is, unless a job that failed above was the cause.
            self._push_halves(left, reason, failure, are_all=len(left) == len(jobs))

    def succeeded(self) -> None:
        """Note that a part was answered."""
        self._has_succeeded = True
        part, self._running = self._running, None
        if part is None:
            return
        for job in part.jobs:
            if line := self._hinted.pop(job, ""):
                self._isolation.hints.was_wrong(line)
        if part.twin is not None:
            part.twin.fails = True

    def next_part(self) -> Part | None:
        """Return the part to run next, without cancelled jobs; None when all jobs are answered.

        Jobs of parts that are not worth another run fail here.
        """
        while self._pending:
            part = self._pop()
            jobs = [job for job in part.jobs if job.is_open]
            if len(jobs) < len(part.jobs):
                part.jobs, part.fails = jobs, False
                if part.twin is not None:
                    part.twin.twin = None
            if jobs and self._is_worth_running(part.reason):
                if part.fails and len(jobs) > 1:
                    self._push_halves(jobs, part.reason, part.failure)
                    continue
                self.runs += 1
                self._running = part
                return part
            self._fail(jobs, part.failure)
        return None

    def _fail(self, jobs: Sequence[Job], failure: Failure) -> None:
        if jobs and failure.rows:
            ids = {job.input.id for job in jobs}
            self._report([row for row in failure.rows if is_about(row, ids)])
            failure.rows = [row for row in failure.rows if not is_about(row, ids)]
        for job in jobs:
            self._has_failed = True
            job.fail(failure.error)

    def _note_alone(self, job: Job, reason: Reason, hint: Hint | None) -> None:
        if reason is Reason.OUT_OF_MEMORY:
            self._is_too_large_alone = True
        line = self._hinted.pop(job, "")
        if line and hint is not None and hint.line == line:
            self._isolation.hints.was_right(line)

    def _follow(self, hint: Hint | None, left: list[Job], reason: Reason, failure: Failure) -> bool:
        """Separate the job that a hint names from the others; return False if there is none.

        The others run first: if the hint is right, they succeed. Where the handler has reported
        metrics, the job runs alone in any case: nothing shows which of them are about it.
        """
        if reason is not Reason.ISOLATION or len(left) < 2 or not self._isolates:
            return False
        isolation, hints = self._isolation, self._isolation.hints
        line = hint.line if hint is not None and hint.suspect in left else ""
        if not hints.follows(line) or hint is None:
            return False
        suspect = hint.suspect
        left.remove(suspect)
        may_believe = isolation.rate.share <= _MAX_SHARE_BELIEVED and not failure.rows
        if may_believe and hints.believes(line):
            isolation.request_failed(suspect, reason)
            self._has_failed = True
            suspect.fail(failure.error)
            self._push(reason, failure, left)
        else:
            self._hinted[suspect] = line
            self._push(reason, failure, [suspect], left, are_all=True)
        return True

    def _push_halves(
        self, jobs: Sequence[Job], reason: Reason, failure: Failure, *, are_all: bool = True
    ) -> None:
        middle = len(jobs) // 2
        self._push(reason, failure, jobs[middle:], jobs[:middle], are_all=are_all)

    def _push(
        self, reason: Reason, failure: Failure, *groups: Sequence[Job], are_all: bool = False
    ) -> None:
        """Add parts, the next to run last; two that are all of a failed batch are twins."""
        parts = [Part(jobs, reason, failure) for jobs in groups if jobs]
        self._pending += parts
        if are_all and len(parts) > 1 and reason is Reason.ISOLATION:
            parts[0].twin, parts[1].twin = parts[1], parts[0]

    def _pop(self) -> Part:
        pending = self._pending
        if not self._has_succeeded:
            return pending.pop()  # the half of a half was added last
        return pending.pop(max(range(len(pending)), key=lambda at: (len(pending[at].jobs), at)))

    def _is_worth_running(self, reason: Reason) -> bool:
        if reason is Reason.OUT_OF_MEMORY:
            return self._has_succeeded or self.runs < self._max_halvings_in_vain
        if not self._isolates:
            return False
        limit = _PROBES if self._isolation.rate.fails_for_all else self._max_in_vain
        return self._has_succeeded or self.runs < limit
