"""Admission by deadlines: refuses jobs that could not be answered in time."""

import math
from collections.abc import Callable, Iterable, Sequence

from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Job
from marserve.frontend.batching.learning.costs import Costs
from marserve.frontend.batching.learning.learning import Learning
from marserve.frontend.batching.lengths.length_grouping import LengthGrouping
from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.policies import MAX_SHED, BatchPolicy, WorkerPoolState
from marserve.frontend.errors import Overloaded

Clock = Callable[[], float]

# When nothing was learnt for this long, the next job is admitted as a probe, even if it would be
# late: otherwise an overestimated cost would never be corrected. Probes come sooner while they take
# only this share of an idle worker's time: else a fast model that was slow for a moment would
# refuse all requests for seconds.
_PROBE_SECONDS = 1.0
_PROBE_SHARE = 0.2


class DeadlineAdmission:
    """Queues jobs that can be answered in time, and refuses the others (``refused``, a number)."""

    def __init__(
        self, queue: JobQueue, workers: WorkerPoolState, learning: Learning, clock: Clock
    ) -> None:
        self.refused = 0
        self._queue = queue
        self._workers = workers
        self._learning = learning
        self._clock = clock
        self._probed_at = -math.inf
        self._answered_at = self._sent_at = 0.0

    def reconfigure(
        self, batching: Batching, policy: BatchPolicy, lengths: LengthGrouping | None
    ) -> None:
        """Apply new settings; ``lengths`` forms batches by length, or is None."""
        self._batching = batching
        self._policy = policy
        self._lengths = lengths
        self._costs: Costs = lengths.costs if lengths else self._learning.costs
        self._prepares = batching.keeps_deadlines or lengths is not None

    def add(self, jobs: Sequence[Job], behind: int = 0) -> None:
        """Queue the jobs of one request in their order, or raise Overloaded for them all.

        ``behind`` jobs of the request follow later, and must be in time, too.
        """
        queue = self._queue
        if self._prepares:
            self._prepare(jobs)
        for job in jobs:
            if (seconds := self._admit(job)) is not None:
                break
            queue.append(job)
        else:
            count = len(jobs) + behind
            seconds = self._check_last(jobs, count) if count > 1 else None
        if seconds is not None:
            queue.discard_all(jobs)
            self._probe(jobs, seconds)
            for job in jobs:
                queue.append(job)

    def expected_seconds(self) -> float:
        """Return the expected time to the answer of a job that arrives now.

        It is 0 while a worker waits for jobs, and while costs are unknown.
        """
        if self._workers.idle or not self._costs.is_known:
            return 0.0
        costs, size = self._costs, self._policy.size
        batches, jobs = divmod(len(self._queue), size)
        wait = self._workers.seconds_until_idle(self._clock())
        ahead = batches * costs.mean(size) / max(1, self._workers.size)
        return wait + ahead + costs.mean(jobs + 1)

    def without_late(self, jobs: Sequence[Job], now: float) -> Sequence[Job]:
        """Refuse the jobs of a batch that would be late in it, and return the others.

        With several priorities the first in the queue may not have the earliest deadline. The jobs
        of a worker that died are not checked before.
        """
        if not self._batching.keeps_deadlines or (len(jobs) == 1 and not jobs[0].crashes):
            return jobs
        answered = now + self._costs.until_answered(self._batching.run_as(len(jobs)))
        late = [job for job in jobs if job.deadline < answered]
        if not late:
            return jobs
        self.refuse(late)
        return [job for job in jobs if job.deadline >= answered]

    def refuse(self, jobs: Iterable[Job]) -> None:
        """Refuse jobs that cannot be in time; Retry-After is when the queue will be empty."""
        size = self._policy.size
        batches = 1 + len(self._queue) // size
        seconds = batches * self._learning.costs.mean(size) / max(1, self._workers.size)
        for job in jobs:
            self.refused += 1
            job.fail(Overloaded(seconds))

    def answered(self, now: float) -> None:
        """Learn from a batch that is answered now how long sending the last one's answers took."""
        if not self._batching.max_latency:
            return
        if self._sent_at > self._answered_at:
            self._learning.costs.observe_sending(self._sent_at - self._answered_at)
        self._answered_at = now

    def answer_sent(self, now: float) -> None:
        """Note that an answer with a deadline is sent to its client."""
        self._sent_at = now

    def _prepare(self, jobs: Sequence[Job]) -> None:
        """Measure the jobs of batches by length; else refuse queued jobs that will be late."""
        if self._lengths is not None:
            self._lengths.measure(jobs)
        else:
            self._refuse_late()

    def _refuse_late(self) -> None:
        """Refuse the jobs at the front that would be late even alone and in a worker now."""
        queue, late = self._queue, 0
        answered = self._clock() + self._costs.until_answered(1)
        most = min(queue.sharing_count, MAX_SHED)
        while late < most and queue.deadline_at(late) < answered:
            late += 1
        if late:
            self.refuse(queue.drop(late))

    def _admit(self, job: Job) -> float | None:
        """Set the order of a job, and return what `BatchPolicy.admit` returns."""
        policy, deadline, priority = self._policy, math.inf, job.priority
        if self._lengths is not None:
            self._lengths.costs.use_job(job.length)
        # The latency goal and the learnt costs are those of predictions.
        is_prediction = job.group is Group.PREDICT
        if goal := self._batching.max_latency:
            priority = policy.promote(job.arrived, priority)
            if is_prediction:
                job.deadline = min(job.deadline, job.arrived + goal)
        if is_prediction:
            deadline = job.deadline
        job.order = policy.order(job.arrived, job.deadline, priority)
        return policy.admit(self._clock(), deadline, self._queue, self._workers)

    def _check_last(self, jobs: Sequence[Job], count: int) -> float | None:
        """Return None if the last of the ``count`` jobs of a request is in time behind the others.

        Else return the seconds after which another try may succeed. Jobs ahead may be refused
        later; those of one request all stay, or none.
        """
        if not self._batching.keeps_deadlines:
            return None
        size = self._policy.size
        batches = math.ceil(count / size / max(1, self._workers.size))
        seconds = batches * self._learning.costs.mean(min(count, size))
        return seconds if self._clock() + seconds > jobs[-1].deadline else None

    def _probe(self, jobs: Sequence[Job], seconds: float) -> None:
        """Admit the jobs of a request that would be late by the learnt costs, to correct these.

        Only the first batch of them is certain to run; the other jobs keep their deadline. Raises
        Overloaded if other jobs would be delayed, or costs were learnt a moment ago.
        """
        now = self._clock()
        pause = min(_PROBE_SECONDS, self._learning.costs.bound(1) / _PROBE_SHARE)
        is_fresh = now - max(self._learning.learnt_at, self._probed_at) < pause
        if not self._workers.idle or self._queue or is_fresh:
            self.refused += 1
            raise Overloaded(seconds)
        self._probed_at = now
        order, deadline = jobs[0].order, jobs[0].deadline
        for place, job in enumerate(jobs):
            job.order, job.deadline = order, math.inf if place < self._policy.size else deadline
