"""Who is let in and who is refused, where answers have deadlines or a latency goal."""

import math
from collections.abc import Callable, Iterable, Sequence

from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Job
from marserve.frontend.batching.latency_model import LatencyModel
from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.policies import BatchPolicy, WorkerPoolState
from marserve.frontend.errors import Overloaded

Clock = Callable[[], float]

# Of so many answers with a deadline, this share may be late before estimates become more careful.
_ANSWERS_LOOKED_AT = 200
_MAX_LATE = 0.01
# Whoever comes when nothing was learnt for so long is tried, whatever is foreseen: else a cost that
# was overestimated would never be corrected. Sooner where that takes a small share of an idle
# worker's time: a model of a few milliseconds that was slow for a moment refused everybody for as
# many seconds as it takes lessons to forget that.
_PROBE_SECONDS = 1.0
_PROBE_SHARE = 0.2


class DeadlineAdmission:
    """Puts jobs into the queue that can be answered in time, and refuses the others.

    Attributes:
        refused: Jobs so far that could not have been answered in time.
        learnt_at: When a batch last taught something about costs.
    """

    def __init__(
        self, queue: JobQueue, workers: WorkerPoolState, costs: LatencyModel, clock: Clock
    ) -> None:
        self.refused = 0
        self.learnt_at = -math.inf
        self._queue = queue
        self._workers = workers
        self._costs = costs
        self._clock = clock
        self._probed_at = -math.inf
        self._answers = self._late = 0
        self._answered_at = self._sent_at = 0.0

    def reconfigure(self, batching: Batching, policy: BatchPolicy) -> None:
        """Admit by other settings from now on."""
        self._batching = batching
        self._policy = policy

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of one request at their places, or raise Overloaded for them all."""
        queue = self._queue
        for job in jobs:
            if (seconds := self._admit(job)) is not None:
                break
            queue.append(job)
        else:
            seconds = self._check_last(jobs) if len(jobs) > 1 else None
        if seconds is not None:
            for job in jobs:
                queue.discard(job)
            self._probe(jobs, seconds)
            for job in jobs:
                queue.append(job)

    def without_late(self, jobs: Sequence[Job], now: float) -> Sequence[Job]:
        """The jobs of a batch less those who would be late in it, which are refused.

        Where priorities differ, the first in the queue is not the one with the earliest deadline.
        """
        if len(jobs) < 2 or not self._batching.keeps_deadlines:
            return jobs
        answered = now + self._costs.mean(self._batching.run_as(len(jobs)))
        late = {job for job in jobs if job.deadline < answered}
        if not late:
            return jobs
        self.refuse(late)
        return [job for job in jobs if job not in late]

    def refuse(self, jobs: Iterable[Job]) -> None:
        """Answer those who cannot be in time; they may come again when the queue is worked off."""
        size = self._policy.size
        batches = 1 + len(self._queue) // size
        seconds = batches * self._costs.bound(size) / max(1, self._workers.size)
        for job in jobs:
            self.refused += 1
            job.fail(Overloaded(seconds))

    def answered(self, jobs: Sequence[Job], now: float) -> None:
        """Learn from a batch that is answered now how long its answers take, and how many are late.

        Estimates become more careful while too many are, and bolder again when none is. The
        distance to the mean is what is steered, never the size of batches by the delay: smaller
        batches mean less capacity, a longer queue, and smaller batches still.
        """
        if not self._batching.max_latency:
            return
        sending = max(0.0, self._sent_at - self._answered_at)  # of the batch before
        if sending:
            self._costs.observe_sending(sending)
        self._answered_at = now
        self._answers += len(jobs)
        self._late += sum(job.deadline < now + sending for job in jobs)
        if self._late > _MAX_LATE * _ANSWERS_LOOKED_AT:
            self._costs.widen()
        elif self._answers >= _ANSWERS_LOOKED_AT:
            self._costs.narrow()
        else:
            return
        self._answers = self._late = 0

    def answer_sent(self, now: float) -> None:
        """Note that an answer that has a deadline goes out to its client."""
        self._sent_at = now

    def _admit(self, job: Job) -> float | None:
        """Settle where in the queue a job goes; returns what `BatchPolicy.admit` does."""
        policy, deadline = self._policy, math.inf
        # The goal is one for predictions, and so is what is known of costs.
        if job.group is Group.PREDICT:
            if self._batching.max_latency:
                job.deadline = min(job.deadline, job.arrived + self._batching.max_latency)
            deadline = job.deadline
        job.order = policy.order(job.arrived, job.deadline, job.priority)
        return policy.admit(self._clock(), job.order, deadline, self._queue, self._workers)

    def _check_last(self, jobs: Sequence[Job]) -> float | None:
        """None where the last of a request's jobs is in time with all of the others; else as above.

        Of others ahead of a job some may yet be refused; of its companions all stay, or none.
        """
        if not self._batching.keeps_deadlines:
            return None
        size = self._policy.size
        batches = math.ceil(len(jobs) / size / max(1, self._workers.size))
        seconds = batches * self._costs.bound(min(len(jobs), size))
        return seconds if self._clock() + seconds > jobs[-1].deadline else None

    def _probe(self, jobs: Sequence[Job], seconds: float) -> None:
        """Let the jobs of a request in that seem hopeless, where nobody suffers from it.

        Their first batch runs and teaches what it costs; the others do as far as that helps.

        Raises:
            Overloaded: Somebody would suffer, or there is little to learn.
        """
        now = self._clock()
        pause = min(_PROBE_SECONDS, self._costs.bound(1) / _PROBE_SHARE)
        is_fresh = now - max(self.learnt_at, self._probed_at) < pause
        if not self._workers.idle or self._queue or is_fresh:
            self.refused += 1
            raise Overloaded(seconds)
        self._probed_at = now
        order, deadline = jobs[0].order, jobs[0].deadline
        for place, job in enumerate(jobs):
            job.order, job.deadline = order, math.inf if place < self._policy.size else deadline
