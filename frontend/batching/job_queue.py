"""The bounded queue of one model version.

Jobs are sorted by `Job.order`, which the policy sets: by arrival, or by deadline. A lower priority
adds a constant to it, so that no priority starves: a job that has waited that much longer goes
first. The capacity is per priority: many requests of one leave the places of the others free.

Jobs whose worker died go first, and each alone, because one of them may have caused the crash.
Jobs whose content has failed before go alone, too, in the order of their arrival. But at most every
other batch is one of them while others wait, and they may not take more than half of the places:
so they cost the others half of the workers' time at most.
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


class JobQueue:
    """A queue of jobs, with a capacity for each priority: that in ``seats``, else ``capacity``.

    Jobs that were sent to a worker do not count.
    """

    def __init__(self, capacity: int, seats: Mapping[Priority, int] | None = None) -> None:
        self._jobs: deque[Job] = deque()
        #: Jobs that are retried, each alone.
        self._retries: deque[Job] = deque()
        #: Jobs that are suspected, each alone; and whether the last to leave was one of them.
        self._suspected: deque[Job] = deque()
        self._is_turn_of_others = False
        self._taken = [0] * len(Priority)
        self.resize(capacity, seats)

    def resize(self, capacity: int, seats: Mapping[Priority, int] | None = None) -> None:
        """Change the capacities; jobs that are queued already stay."""
        self.capacity = capacity
        self._seats = [(seats or {}).get(priority, capacity) for priority in Priority]

    def __len__(self) -> int:
        return len(self._jobs) + len(self._retries) + len(self._suspected)

    @property
    def sharing(self) -> int:
        """How many jobs may share batches."""
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return chain(self._retries, self._suspected, self._jobs)

    @property
    def suspected(self) -> int:
        """How many jobs run alone because their contents have failed before."""
        return len(self._suspected)

    def has_seat(self, priority: Priority, count: int = 1) -> bool:
        """Whether there is room for ``count`` more jobs of a priority."""
        return self._taken[priority] + count <= self._seats[priority]

    def free_seats(self, priority: Priority) -> int:
        """For how many more jobs of a priority there is room."""
        return max(0, self._seats[priority] - self._taken[priority])

    def share_taken(self, priority: Priority) -> float:
        """The share of the seats of a priority that are taken; 1 or more where none is free."""
        return self._taken[priority] / self._seats[priority]

    def has_seat_for_suspected(self, count: int) -> bool:
        """Whether there is room for ``count`` more suspected jobs."""
        return len(self._suspected) + count <= max(1, self.capacity // 2)

    # -- looking (all but the last three: only for a queue that is not empty) ----------------------

    @property
    def first(self) -> Job:
        """The job that leaves next."""
        if self._retries or self._suspected:
            return self._next_queue[0]
        return self._jobs[0]

    @property
    def first_sharing(self) -> Job:
        """The first job of those that share batches; there must be one."""
        return self._jobs[0]

    @property
    def first_runs_alone(self) -> bool:
        """Whether the first job must not share a batch."""
        if (self._retries or self._suspected) and self._next_queue is not self._jobs:
            return True
        return self._jobs[0].group is Group.DESCRIBE

    @property
    def _next_queue(self) -> deque[Job]:
        if self._retries:
            return self._retries
        suspected, jobs = self._suspected, self._jobs
        if suspected and (
            not jobs or (suspected[0].order <= jobs[0].order and not self._is_turn_of_others)
        ):
            return suspected
        return jobs

    @property
    def oldest_arrival(self) -> float:
        """The arrival of the job that has waited longest, if there are any that share batches."""
        return min(job.arrived for job in (*self._retries, *(self._jobs or self._suspected)))

    def deadline_at(self, index: int) -> float:
        """The deadline of the job at this index of those that share batches."""
        return self._jobs[index].deadline

    @property
    def earliest_deadline(self) -> float:
        """The earliest deadline of all jobs; infinite if there is none."""
        return min((job.deadline for job in self._jobs), default=math.inf)

    @property
    def has_rows_of_lists(self) -> bool:
        """Whether one of the jobs that share batches is a row of a list: `Job.is_row_of_list`."""
        return any(job.is_row_of_list for job in self._jobs)

    def of_first_group(self, count: int) -> list[Job]:
        """The first ``count`` jobs that share batches, less those of other groups than the first.

        Cancelled ones are left out, too, but for the first.
        """
        first = self._jobs[0]
        return [
            job
            for job in islice(self._jobs, count)
            if job is first or (job.group is first.group and job.is_open)
        ]

    def is_held_up(self, since: float) -> bool:
        """Whether a job that runs alone has waited since then, or is a retry."""
        return bool(self._retries) or (bool(self._suspected) and self._suspected[0].arrived < since)

    # -- changing ----------------------------------------------------------------------------------

    def append(self, job: Job) -> None:
        """Insert a job behind those of the same order; the caller has checked `has_seat`."""
        jobs = self._suspected if job.is_suspected else self._jobs
        self._taken[job.priority] += 1
        if not jobs or jobs[-1].order <= job.order:
            jobs.append(job)
        else:
            jobs.insert(bisect_right(jobs, job.order, key=_order_of), job)

    def requeue(self, job: Job) -> None:
        """Queue a job again whose worker died, whatever the capacity.

        It goes in front, to run alone; to its old place if it is known not to be the cause.
        """
        job.dispatched = None
        if not job.crashes:
            self.append(job)
            return
        self._taken[job.priority] += 1
        self._retries.append(job)

    def reorder(self, order: Callable[[Job], float]) -> None:
        """Sort the jobs by another order; retries stay in front."""
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
                self._taken[job.priority] -= 1
        elif (place := self._place_of(job)) is not None:
            del self._jobs[place]
            self._taken[job.priority] -= 1

    def pop(self, count: int) -> list[Job]:
        """Take up to ``count`` jobs of one group from the front, dropping cancelled ones.

        Taking stops before a job of another group, or one that must run alone.
        """
        if self._retries:
            popped: list[Job] = []
            self._take_first(self._retries, popped)
            return popped
        if self._suspected and self._next_queue is self._suspected:
            return self.pop_suspected()
        return self.pop_sharing(count)

    def pop_suspected(self) -> list[Job]:
        """Take the first of the suspected jobs, unless it is cancelled."""
        popped: list[Job] = []
        self._take_first(self._suspected, popped)
        self._is_turn_of_others = bool(popped)
        return popped

    def pop_sharing(self, count: int) -> list[Job]:
        """Take jobs that may share a batch, as `pop` does."""
        self._is_turn_of_others = False
        popped: list[Job] = []
        jobs, taken, group = self._jobs, self._taken, None
        while jobs and len(popped) < count:
            job = jobs[0]
            if popped and (job.group is not group or group is Group.DESCRIBE):
                break
            jobs.popleft()
            taken[job.priority] -= 1
            if job.is_open:
                popped.append(job)
                group = job.group
        return popped

    def pop_chosen(self, chosen: Collection[Job]) -> list[Job]:
        """Take these jobs, which share a batch and are near the front; drops cancelled ones."""
        self._is_turn_of_others = False
        popped: list[Job] = []
        passed: list[Job] = []
        left = set(chosen)
        while left and self._jobs:
            job = self._jobs[0]
            if job in left:
                left.remove(job)
                self._take_first(self._jobs, popped)
            else:
                passed.append(self._jobs.popleft())
        self._jobs.extendleft(reversed(passed))
        return popped

    def drop(self, count: int) -> list[Job]:
        """Remove the first ``count`` jobs of those that share batches, whatever their groups.

        Returns those that are not cancelled.
        """
        dropped: list[Job] = []
        for _ in range(count):
            self._take_first(self._jobs, dropped)
        return dropped

    def clear(self) -> list[Job]:
        """Remove and return all jobs."""
        jobs = [*self]
        self._retries.clear()
        self._suspected.clear()
        self._jobs.clear()
        self._taken = [0] * len(Priority)
        return jobs

    def _place_of(self, job: Job) -> int | None:
        jobs = self._jobs
        first = bisect_left(jobs, job.order, key=_order_of)
        for place in range(first, len(jobs)):
            if jobs[place] is job:
                return place
            if jobs[place].order != job.order:
                break
        return None

    def _take_first(self, jobs: deque[Job], into: list[Job]) -> None:
        job = jobs.popleft()
        self._taken[job.priority] -= 1
        if job.is_open:
            into.append(job)
