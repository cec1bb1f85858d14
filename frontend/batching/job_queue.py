"""The bounded queue of one model version.

Jobs stand in the order in which they are due to leave (`Job.order`), which is for the policy to
decide: by arrival, or by deadline. A lower priority puts it later by a constant, so that none
starves: a job that has waited that much longer goes first. Seats are bounded per priority: a flood
of one leaves the seats of the others free.

Jobs whose worker died go before all others, and each by itself, for one of them may be to blame.
"""

import contextlib
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from operator import attrgetter

from marserve.frontend.batching.jobs import Group, Job, Priority

_order_of = attrgetter("order")


class JobQueue:
    """See the module; ``capacity`` jobs of a priority may wait where ``seats`` says nothing of it.

    Those in a worker do not count.
    """

    def __init__(self, capacity: int, seats: Mapping[Priority, int] | None = None) -> None:
        self._jobs: deque[Job] = deque()
        #: Jobs that are to be run once more, each alone.
        self._retries: deque[Job] = deque()
        self._taken = [0] * len(Priority)
        self.resize(capacity, seats)

    def resize(self, capacity: int, seats: Mapping[Priority, int] | None = None) -> None:
        """Change the bounds; no job that has a seat loses it."""
        self.capacity = capacity
        self._seats = [(seats or {}).get(priority, capacity) for priority in Priority]

    def __len__(self) -> int:
        return len(self._jobs) + len(self._retries)

    def has_seat(self, priority: Priority, count: int = 1) -> bool:
        """Whether so many more jobs of a priority may join."""
        return self._taken[priority] + count <= self._seats[priority]

    def free_seats(self, priority: Priority) -> int:
        """How many more jobs of a priority may join."""
        return max(0, self._seats[priority] - self._taken[priority])

    # -- what stands where (all but the last two: only for a queue that is not empty) --------------

    @property
    def first(self) -> Job:
        """The job that leaves next."""
        return self._retries[0] if self._retries else self._jobs[0]

    @property
    def first_runs_alone(self) -> bool:
        """Whether the first must not share a batch."""
        return bool(self._retries) or self._jobs[0].group is Group.DESCRIBE

    @property
    def oldest_arrival(self) -> float:
        """When the job arrived that has waited longest."""
        return min(job.arrived for job in (*self._retries, *self._jobs))

    def deadline_at(self, index: int) -> float:
        """The deadline of the job at this place, from 0, behind those that run alone again."""
        return self._jobs[index].deadline

    @property
    def earliest_deadline(self) -> float:
        """The earliest of all, infinite for none."""
        return min((job.deadline for job in self._jobs), default=math.inf)

    def ahead_of(self, order: float) -> int:
        """How many jobs would leave before one of this `Job.order` that joined now."""
        jobs = self._jobs
        if not jobs or jobs[-1].order <= order:
            return len(self)
        return len(self._retries) + bisect_right(jobs, order, key=_order_of)

    # -- coming and going --------------------------------------------------------------------------

    def append(self, job: Job) -> None:
        """Add a job at its place, behind those of the same order; the caller asked `has_seat`."""
        jobs = self._jobs
        self._taken[job.priority] += 1
        if not jobs or jobs[-1].order <= job.order:
            jobs.append(job)
        else:
            jobs.insert(bisect_right(jobs, job.order, key=_order_of), job)

    def requeue(self, job: Job) -> None:
        """Take a job in again whose worker died; it goes first, and alone, whatever the bounds."""
        job.dispatched = None
        self._taken[job.priority] += 1
        self._retries.append(job)

    def reorder(self, order: Callable[[Job], float]) -> None:
        """Put the jobs into another order; those that run alone again stay in front."""
        for job in self._jobs:
            job.order = order(job)
        self._jobs = deque(sorted(self._jobs, key=_order_of))

    def discard(self, job: Job) -> None:
        """Take a job out, wherever it stands; nothing if it has left already."""
        if job.dispatched is not None:
            return
        if job.crashes:
            with contextlib.suppress(ValueError):
                self._retries.remove(job)
                self._taken[job.priority] -= 1
        elif (place := self._place_of(job)) is not None:
            del self._jobs[place]
            self._taken[job.priority] -= 1

    def pop(self, count: int) -> list[Job]:
        """Take up to ``count`` jobs of one group from the front, less those nobody waits for.

        A job of another group ends what is taken before it; one that must run alone does.
        """
        popped: list[Job] = []
        if self._retries:
            self._take_first(self._retries, popped)
            return popped
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

    def drop(self, count: int) -> list[Job]:
        """Take out the first ``count`` jobs behind those that run alone, whatever their groups.

        Returns those for whose answer somebody waits.
        """
        dropped: list[Job] = []
        for _ in range(count):
            self._take_first(self._jobs, dropped)
        return dropped

    def clear(self) -> list[Job]:
        """Take all jobs out."""
        jobs = [*self._retries, *self._jobs]
        self._retries.clear()
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
