"""Whether a job that may be late should run, by the expected number of answers in time.

Where costs vary, refusing the jobs that might be late is no cure: if nobody else gains by it, an
answer that was likely to be in time is lost. A job runs if the chance that it is in time is higher
than what all the others would gain together if it were refused:

    the next batch has room     its other jobs, and those that come while it runs, are answered
                                sooner by the cost of one job
    more jobs wait              one job of each of the batches to come leaves a batch earlier,
                                until the queue is empty again; with more arrivals that takes longer
"""

from typing import NamedTuple

from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.learning.latency_model import Costs

#: A job that is less likely than this to be in time is refused. Late answers cost work, too; in
#: simulation a lower limit gains nothing.
LEAST_CHANCE = 0.5
# Arrivals make the time until the queue is empty this many times as long at most: nobody knows how
# long a load stays as it is.
_MAX_PROLONGED = 8.0
# The next batch becomes larger by what arrives in the time of a job, and so on; at most by this.
_MAX_GROWTH = 0.9
# How many batches of those that wait are looked at: a decision must take no longer than one.
_MAX_BATCHES_AHEAD = 100


class Outlook(NamedTuple):
    """What can be known about the jobs in a queue, and those to come, at a moment.

    Attributes:
        costs: The learnt costs.
        queue: The queue.
        now: The moment.
        size: The largest batch.
        workers: How many there are.
        rate: Arrivals per second.
        goal: The latency goal; infinite for none.
    """

    costs: Costs
    queue: JobQueue
    now: float
    size: int
    workers: int
    rate: float
    goal: float

    def should_run(self, place: int) -> bool:
        """Whether the job at this place leaves with those behind it; all before it are refused."""
        waiting = self.queue.sharing - place
        batch = min(waiting, self.size)
        chance = self.costs.chance(batch, self._left(place))
        if chance < LEAST_CHANCE:
            return False
        if waiting <= self.size:
            return chance > self._gain_in_batch(place, batch) + self._gain_of_later_jobs(batch)
        return not self._is_worth_more_behind(place, chance)

    def _left(self, place: int) -> float:
        return self.queue.deadline_at(place) - self.now

    def _gain_in_batch(self, place: int, batch: int) -> float:
        """What the other jobs of a batch would gain if the first were not in it."""
        chance = self.costs.chance
        others = map(self._left, range(place + 1, place + batch))
        return sum(chance(batch - 1, left) - chance(batch, left) for left in others)

    def _gain_of_later_jobs(self, batch: int) -> float:
        """What the jobs would gain that come while a batch runs; they wait for half of it."""
        if batch == 1:
            return 0.0
        chance, seconds = self.costs.chance, self.costs.mean(batch)
        sooner = seconds - self.costs.mean(batch - 1)
        rate = self.rate / self.workers
        left = self.goal - seconds / 2 / self.workers
        gain = chance(batch, left) - chance(batch, left - sooner)
        return gain * rate * seconds / (1.0 - min(_MAX_GROWTH, rate * sooner))

    def _is_worth_more_behind(self, place: int, chance_here: float) -> bool:
        """Whether jobs behind gain as much if the first of each batch to come leaves one earlier.

        It is no more than one job in all that is answered instead of this one, so that the sum is
        not needed beyond that. Each of many jobs that are refused in one go asks for this.
        """
        chance, size = self.costs.chance, self.size
        interval = self.costs.mean(size) / self.workers
        load = self.rate * interval / size
        enough = chance_here * max(1.0 / _MAX_PROLONGED, 1.0 - load)
        gain = wait = 0.0
        end = min(self.queue.sharing, place + size * _MAX_BATCHES_AHEAD)
        for first in range(place + size, end, size):
            left = self._left(first) - wait
            gain += chance(size, left) - chance(size, left - interval)
            if gain >= enough:
                return True
            wait += interval
        return False
