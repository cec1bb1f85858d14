"""Decides whether a job that may be late should run, by the expected number of answers in time.

A job runs if its chance to be in time is higher than what all other jobs together would gain if it
were refused:

    all jobs fit into the next batch   its other jobs, and those that arrive while it runs, are
                                       answered sooner by the cost of one job
    more jobs are queued               one job of each later batch leaves a batch earlier, until the
                                       queue is empty; with more arrivals that takes longer
"""

from typing import NamedTuple

from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.learning.costs import Costs

#: A job that is less likely than this to be in time is refused. In simulation a lower limit gains
#: nothing.
LEAST_CHANCE = 0.5
# Arrivals prolong the time until the queue is empty by at most this factor: a load does not last.
_MAX_PROLONGED = 8.0
# The most by which the next batch grows by what arrives in the time of a job.
_MAX_GROWTH = 0.9
# The number of queued batches that are considered; it limits the time of a decision.
_MAX_BATCHES_AHEAD = 100


class Outlook(NamedTuple):
    """The queued and expected jobs: ``rate`` per second, of a latency ``goal`` in seconds."""

    costs: Costs
    queue: JobQueue
    now: float
    size: int
    workers: int
    rate: float
    goal: float

    def should_run(self, index: int) -> bool:
        """Return whether the job at this index should run, if all before it are refused."""
        waiting = self.queue.sharing_count - index
        batch = min(waiting, self.size)
        chance = self.costs.chance(batch, self._left(index))
        if chance < LEAST_CHANCE:
            return False
        if waiting <= self.size:
            return chance > self._gain_in_batch(index, batch) + self._gain_of_later_jobs(batch)
        return not self._is_worth_more_behind(index, chance)

    def _left(self, index: int) -> float:
        return self.queue.deadline_at(index) - self.now

    def _gain_in_batch(self, index: int, batch: int) -> float:
        """Return what the other jobs of a batch would gain if the first were not in it."""
        chance = self.costs.chance
        others = map(self._left, range(index + 1, index + batch))
        return sum(chance(batch - 1, left) - chance(batch, left) for left in others)

    def _gain_of_later_jobs(self, batch: int) -> float:
        """Return what jobs would gain that arrive while a batch runs; they wait for half of it."""
        if batch == 1:
            return 0.0
        chance, seconds = self.costs.chance, self.costs.mean(batch)
        sooner = seconds - self.costs.mean(batch - 1)
        rate = self.rate / self.workers
        left = self.goal - seconds / 2 / self.workers
        gain = chance(batch, left) - chance(batch, left - sooner)
        return gain * rate * seconds / (1.0 - min(_MAX_GROWTH, rate * sooner))

    def _is_worth_more_behind(self, index: int, chance_here: float) -> bool:
        """Return whether later jobs gain as much if the first of each batch leaves one earlier.

        The sum ends where it is enough: many jobs may be refused at once, each by this loop.
        """
        chance, size = self.costs.chance, self.size
        interval = self.costs.mean(size) / self.workers
        load = self.rate * interval / size
        enough = chance_here * max(1.0 / _MAX_PROLONGED, 1.0 - load)
        gain = wait = 0.0
        end = min(self.queue.sharing_count, index + size * _MAX_BATCHES_AHEAD)
        for first in range(index + size, end, size):
            left = self._left(first) - wait
            gain += chance(size, left) - chance(size, left - interval)
            if gain >= enough:
                return True
            wait += interval
        return False
