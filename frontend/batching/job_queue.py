"""The bounded queue of one model version.

Jobs are sorted by `Job.order`, which the policy sets: by arrival, or by deadline. A lower priority
adds a constant to it, so that no priority starves.

Jobs whose worker died are first, and each runs alone, because one of them may have caused the
crash. Jobs whose content has failed before run alone, too. At most every other batch is one of them
while others wait, and they have at most half of the capacity: so they use at most half of the
workers' time.
"""

import contextlib
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, islice
from operator import attrgetter

from marserve.frontend.batching.jobs import Group, Job, Priority

_order_of = attrgetter("order")
# A smaller share of the queue is removed job by job.
_FEW = 50


class JobQueue:
    """A queue of jobs with a capacity for each priority: that in ``capacities``, or ``capacity``.

    Jobs that were sent to a worker do not count.
    """

    def __init__(self, capacity: int, capacities: Mapping[Priority, int] | None = None) -> None:
        self._jobs: deque[Job] = deque()
        #: Jobs that are retried, each alone.
        self._retries: deque[Job] = deque()
        #: Jobs that are suspected, each alone; and whether the last batch was one of them.
        self._suspected: deque[Job] = deque()
        self._is_turn_of_others = False
        self._used = [0] * len(Priority)
        self.resize(capacity, capacities)

    def resize(self, capacity: int, capacities: Mapping[Priority, int] | None = None) -> None:
        """Change the capacities; queued jobs stay."""
        self.capacity = capacity
        self._capacities = [(capacities or {}).get(priority, capacity) for priority in Priority]

    def __len__(self) -> int:
        return len(self._jobs) + len(self._retries) + len(self._suspected)

    def __iter__(self) -> Iterator[Job]:
        return chain(self._retries, self._suspected, self._jobs)

    @property
    def sharing_count(self) -> int:
        """Number of jobs that may share batches."""
        return len(self._jobs)

    @property
    def suspected_count(self) -> int:
        """Number of jobs that run alone because their contents have failed before."""
        return len(self._suspected)

    def capacity_of(self, priority: Priority) -> int:
        """Return the number of jobs of a priority that may be queued."""
        return self._capacities[priority]

    def has_capacity(self, priority: Priority, count: int = 1) -> bool:
        """Return whether the queue has capacity for ``count`` more jobs of a priority."""
        return self._used[priority] + count <= self._capacities[priority]

    def free_capacity(self, priority: Priority) -> int:
        """Return the number of jobs of a priority for which there is capacity."""
        return max(0, self._capacities[priority] - self._used[priority])

    def share_taken(self, priority: Priority) -> float:
        """Return the share of the capacity of a priority that is used; may be more than 1."""
        return self._used[priority] / self._capacities[priority]

    def has_capacity_for_suspected(self, count: int) -> bool:
        """Return whether ``count`` more suspected jobs may be queued."""
        return len(self._suspected) + count <= max(1, self.capacity // 2)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def first(self) -> Job:
        """The job that leaves next; the queue must not be empty."""
        return self._next_jobs[0]

    @property
    def first_runs_alone(self) -> bool:
        """Whether the first job must not share a batch; the queue must not be empty."""
        jobs = self._next_jobs
        return jobs is not self._jobs or jobs[0].group is Group.DESCRIBE

    @property
    def first_sharing(self) -> Job:
        """The first job of those that share batches; there must be one."""
        return self._jobs[0]

    @property
    def _next_jobs(self) -> deque[Job]:
        """Those of the jobs whose first leaves next."""
        jobs, suspected = self._jobs, self._suspected
        if self._retries:
            return self._retries
        if not suspected or (jobs and self._is_turn_of_others):
            return jobs
        return suspected if not jobs or suspected[0].order <= jobs[0].order else jobs

    @property
    def oldest_arrival(self) -> float:
        """The earliest arrival; of suspected jobs only while no others share batches."""
        return min(job.arrived for job in (*self._retries, *(self._jobs or self._suspected)))

    @property
    def earliest_deadline(self) -> float:
        """The earliest deadline of the jobs that share batches; infinite for none."""
        return min((job.deadline for job in self._jobs), default=math.inf)

    def deadline_at(self, index: int) -> float:
        """Return the deadline of the job at this index of those that share batches."""
        return self._jobs[index].deadline

    @property
    def has_rows_of_lists(self) -> bool:
        """Whether one of the jobs that share batches is a row of a list (`Job.is_row_of_list`)."""
        return any(job.is_row_of_list for job in self._jobs)

    def of_first_group(self, count: int) -> list[Job]:
        """Return the jobs of the first ``count`` sharing ones that may join the first."""
        first = self._jobs[0]
        return [
            job
            for job in islice(self._jobs, count)
            if job is first or (job.group is first.group and job.is_open)
        ]

    def is_held_up(self, since: float) -> bool:
        """Return whether a job that runs alone has waited since then, or is a retry."""
        return bool(self._retries) or (bool(self._suspected) and self._suspected[0].arrived < since)

    # -- changing ----------------------------------------------------------------------------------

    def append(self, job: Job) -> None:
        """Insert a job behind those of the same order; the caller has checked the capacity."""
        jobs = self._suspected if job.is_suspected else self._jobs
        self._used[job.priority] += 1
        if not jobs or jobs[-1].order <= job.order:
            jobs.append(job)
        else:
            jobs.insert(bisect_right(jobs, job.order, key=_order_of), job)

    def requeue(self, job: Job) -> None:
        """Queue a job again whose worker died, also beyond the capacity.

        It is retried alone, or returns to its old position if it is not the cause (`Job.crashes`).
        """
        job.dispatched = job.batch = None
        if not job.crashes:
            self.append(job)
            return
        self._used[job.priority] += 1
        self._retries.append(job)

    def reorder(self, order: Callable[[Job], float]) -> None:
        """Sort the jobs by another order; retries stay first, and promotions are lost."""
        for job in (*self._jobs, *self._suspected):
            job.order = order(job)
        self._jobs = deque(sorted(self._jobs, key=_order_of))
        self._suspected = deque(sorted(self._suspected, key=_order_of))

    def discard(self, job: Job) -> None:
        """Remove a job; does nothing if it was sent to a worker already."""
        if job.dispatched is not None:
            return
        if job.crashes or job.is_suspected:
            with contextlib.suppress(ValueError):
                (self._retries if job.crashes else self._suspected).remove(job)
                self._used[job.priority] -= 1
        elif (index := self._index_of(job)) is not None:
            del self._jobs[index]
            self._used[job.priority] -= 1

    def discard_all(self, jobs: Collection[Job]) -> None:
        """Remove jobs, as `discard` does."""
        if len(jobs) < len(self) // _FEW:
            for job in jobs:
                self.discard(job)
            return
        gone = {job for job in jobs if job.dispatched is None}
        for queue in (self._jobs, self._retries, self._suspected):
            kept = []
            for job in queue:
                if job in gone:
                    self._used[job.priority] -= 1
                else:
                    kept.append(job)
            queue.clear()
            queue.extend(kept)

    def pop(self, count: int) -> list[Job]:
        """Take up to ``count`` jobs of one group from the front, dropping cancelled ones.

        Stops before a job of another group, or one that must run alone.
        """
        jobs = self._next_jobs
        if jobs is self._retries:
            return self._take_first(jobs)
        return self.pop_suspected() if jobs is self._suspected else self.pop_sharing(count)

    def pop_suspected(self) -> list[Job]:
        """Take the first of the suspected jobs, unless it is cancelled."""
        popped = self._take_first(self._suspected)
        self._is_turn_of_others = bool(popped)
        return popped

    def pop_sharing(self, count: int) -> list[Job]:
        """Take jobs that may share a batch, as `pop` does."""
        self._is_turn_of_others = False
        popped: list[Job] = []
        jobs, used, group = self._jobs, self._used, None
        while jobs and len(popped) < count:
            job = jobs[0]
            if popped and (job.group is not group or group is Group.DESCRIBE):
                break
            jobs.popleft()
            used[job.priority] -= 1
            if job.is_open:
                popped.append(job)
                group = job.group
        return popped

    def pop_chosen(self, chosen: Collection[Job]) -> list[Job]:
        """Take these jobs, which share a batch and are near the front; drops cancelled ones."""
        self._is_turn_of_others = False
        popped: list[Job] = []
        passed: list[Job] = []
        missing = set(chosen)
        while missing and self._jobs:
            job = self._jobs[0]
            if job in missing:
                missing.remove(job)
                popped += self._take_first(self._jobs)
            else:
                passed.append(self._jobs.popleft())
        self._jobs.extendleft(reversed(passed))
        return popped

    def drop(self, count: int) -> list[Job]:
        """Remove the first ``count`` sharing jobs, of any group; return those that are open."""
        return [job for _ in range(count) for job in self._take_first(self._jobs)]

    def clear(self) -> list[Job]:
        """Remove and return all jobs."""
        jobs = [*self]
        self._retries.clear()
        self._suspected.clear()
        self._jobs.clear()
        self._used = [0] * len(Priority)
        return jobs

    def _index_of(self, job: Job) -> int | None:
        jobs = self._jobs
        for index in range(bisect_left(jobs, job.order, key=_order_of), len(jobs)):
            if jobs[index] is job:
                return index
            if jobs[index].order != job.order:
                break
        return None

    def _take_first(self, jobs: deque[Job]) -> list[Job]:
        """Remove the first of these jobs; return it unless it is cancelled."""
        job = jobs.popleft()
        self._used[job.priority] -= 1
        return [job] if job.is_open else []
