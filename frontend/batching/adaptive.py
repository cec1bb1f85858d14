"""The adaptive batching policy: forms batches by deadlines and learnt costs.

The earliest deadline leaves first. Jobs are refused on arrival if they would be late in the next
batch, and at the front of the queue if they would be late in a full one. A batch has all queued
jobs, up to the largest size. Several workers would each take a small batch, and all be busy when
the next request arrives; so a batch is held until it has the smallest size that keeps the workers
stable.

Rules and constants come from simulation (``benchmarks/batching_sim`` runs this class); early drop
is from Nexus (SOSP 2019), refusal by the predicted end from Clockwork (OSDI 2020).
"""

import math
from dataclasses import dataclass

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Priority
from marserve.frontend.batching.learning.costs import Costs
from marserve.frontend.batching.policies import (
    AGING_SECONDS,
    BatchPolicy,
    Plan,
    WorkerPoolState,
)

# How much longer a priority waits than the next higher one, as a share of the latency goal: the
# lowest still has a third of the goal left when its turn comes. Without a goal: AGING_SECONDS.
_AGING_GOALS = 1 / 3
# While more jobs wait than a batch takes, others take the place of those that are refused: the
# first job must be in time even if its batch takes this many mean deviations longer than the mean.
_MARGIN_DEVIATIONS = 1.5
# From this deviation on, costs vary widely. A lognormal factor of sigma 0.31 has it.
_WIDE = 0.25
# Above this share of the workers' capacity, under a goal, batches are held until they are full,
# since only full batches carry the load; without a goal none is held.
_FULL_LOAD = 0.8
# The share of the time left before the deadline that holding may use; the second one where only
# full batches carry the load.
_HOLD_SHARE = 0.3
_PRESSED_HOLD_SHARE = 0.9
# The longest hold, as a multiple of the expected time until the missing jobs arrive.
_HOLD_ARRIVALS = 2.0
# How long to hold for the next requests of clients: at most this share of the cost of one request,
# beyond which holding does not pay, and at most these seconds, for the round trip.
_RETURN_SHARE = 0.5
_RETURN_SECONDS = 0.010
# From this share of returning clients on, traffic counts as a closed loop; in an open loop fewer
# than half arrive in that time by chance. Averaged over about ten batches.
_RETURNING = 0.8
_RETURN_STEP = 0.1
# The rate of arrivals is averaged over the time of this many full batches, and at least this long.
_RATE_BATCHES = 4.0
_MIN_RATE_SECONDS = 0.05


@dataclass
class Adaptive(BatchPolicy):
    """Forms batches by deadlines and learnt costs."""

    costs: Costs
    goal: float = math.inf  # seconds from arrival to answer
    max_hold: float = math.inf  # seconds for the first job in the queue; 0 never holds
    num_requests: int = 0  # that the clients keep in flight; 0 for unknown

    def __post_init__(self) -> None:
        self._horizon, self._aging = AGING_SECONDS, AGING_SECONDS
        if self.goal < math.inf:
            self._horizon, self._aging = self.goal, _AGING_GOALS * self.goal
        #: The latest arrival of each priority; when a job of it was last promoted.
        self._latest = [-math.inf] * len(Priority)
        self._promoted: dict[Priority, float] = {}
        self._rate = _ArrivalRate()
        # With `num_requests`, clients are assumed to return at once until traffic differs.
        self._returns = _ReturningClients(1.0 if self.num_requests else 0.0)

    def promote(self, arrived: float, priority: Priority) -> Priority:
        """Note an arrival; promote a job of each lower priority from time to time.

        Jobs of a lower priority may be refused before their turn comes. None is promoted unless
        jobs of higher priorities arrive.
        """
        self._latest[priority] = arrived
        if priority and arrived - self._promoted.setdefault(priority, arrived) >= self._aging:
            self._promoted[priority] = arrived
            if arrived - max(self._latest[:priority]) < self.goal:
                return Priority.HIGH
        return priority

    def order(self, arrived: float, deadline: float, priority: Priority) -> float:
        """Return the deadline as the sort key; without one, the deadline that the goal gives."""
        return min(deadline, arrived + self._horizon) + priority * self._aging

    def admit(
        self, now: float, deadline: float, queue: JobQueue, workers: WorkerPoolState
    ) -> float | None:
        """Refuse a job that would be late even if it were the next to leave; else count it.

        Jobs ahead do not count: if there are too many, those at the front are refused in its place.
        Those would leave with less time left, and more of them be late.
        """
        del queue
        if deadline < math.inf and self.costs.is_known:
            seconds = workers.seconds_until_idle(now) + self.costs.until_answered(1)
            if now + seconds > deadline:
                return seconds
        self._rate.count(now)
        self._returns.count(now)
        return None

    def answered(self, now: float, jobs: int) -> None:
        """Count the next requests of the clients that are answered now."""
        self._returns.begin(jobs, now + self._return_seconds)

    def plan(self, now: float, queue: JobQueue, workers: WorkerPoolState) -> Plan:
        """Refuse late jobs at the front; take the others, or hold them."""
        queued = queue.sharing_count
        if not self.costs.is_known:
            return self._take(min(queued, self.size))
        shed, take = self._in_time(now, queue, queued, workers.size)
        # With several workers, the jobs behind those that are refused may be held.
        if not take or (shed and take < self.size and workers.size > 1):
            return Plan(0, Reason.WORK_CONSERVING, shed=shed)
        if take < self.size and not shed and self.max_hold:
            return self._take_or_hold(now, queue, workers, take)
        return self._take(take, shed)

    def _take(self, take: int, shed: int = 0) -> Plan:
        return Plan(take, Reason.FULL if take == self.size else Reason.WORK_CONSERVING, shed)

    # -- jobs in time ------------------------------------------------------------------------------

    def _in_time(self, now: float, queue: JobQueue, queued: int, workers: int) -> tuple[int, int]:
        """Return how many jobs at the front to refuse, and how many behind them to take.

        A job that would be late in a full batch is refused: a smaller batch for it would cost
        capacity, and more jobs would be late (early drop). Where costs vary widely, it is refused
        if it would be late in a batch of all queued jobs, as in BentoML's dispatcher: the others
        then have time left for a slow batch. Several workers are rarely all slow at once, so with K
        of them it is a batch of all queued jobs divided by the root of K.
        """
        seconds, size, deviation = self.costs.until_answered, self.size, self.costs.deviation
        largest, margin = size, 1.0 + _MARGIN_DEVIATIONS * deviation
        if deviation > _WIDE:
            largest, margin = max(size, int(queued / math.sqrt(workers))), 1.0
        most = min(queued, self.max_shed)
        for shed in range(most):
            waiting = queued - shed
            expected = seconds(min(waiting, largest)) * (margin if waiting > size else 1.0)
            if now + expected <= queue.deadline_at(shed):
                return shed, min(waiting, size)
        return most, 0

    def _arrival_rate(self, now: float) -> float:
        seconds = _RATE_BATCHES * self.costs.mean(self.size)
        return self._rate.at(now, max(_MIN_RATE_SECONDS, seconds))

    # -- holding back ------------------------------------------------------------------------------

    def _take_or_hold(
        self, now: float, queue: JobQueue, workers: WorkerPoolState, queued: int
    ) -> Plan:
        if workers.size == 1:
            return self._hold_for_clients(now, queue, workers, queued)
        if workers.idle > 1:  # there is a worker for the next batch, too
            return self._take(queued)
        rate = self._arrival_rate(now)
        target = self._target(rate, workers.size)
        if queued >= target:
            return Plan(queued, Reason.TARGET if target > 1 else Reason.WORK_CONSERVING)
        full = target
        if self.num_requests:
            full = min(full, self.num_requests - workers.in_flight)
            if queued >= full:
                return Plan(queued, Reason.NO_MORE_CLIENTS)
        until = self._hold_until(queue, queued, target, rate)
        if now >= until:
            return Plan(queued, Reason.HOLD_EXPIRED)
        return Plan(0, Reason.HOLD_EXPIRED, until=until, full=full)

    def _hold_for_clients(
        self, now: float, queue: JobQueue, workers: WorkerPoolState, queued: int
    ) -> Plan:
        """Hold for a moment for the next requests of clients whose answers were just sent.

        Such clients would otherwise split into two groups that take turns, in batches of half the
        size. Not done unless `num_requests` or traffic shows that clients return at once.
        """
        missing = self._returns.missing
        if missing and self.num_requests:
            missing = self.num_requests - queued
        full = min(self.size, queued + missing)
        until = workers.last_idle_at + min(self.max_hold, self._return_seconds)
        until = min(until, queue.deadline_at(0) - self.costs.bound(full))  # in time with all
        if queued < full and now < until:
            return Plan(0, Reason.HOLD_EXPIRED, until=until, full=full)
        if self.num_requests and queued >= self.num_requests:
            return Plan(queued, Reason.NO_MORE_CLIENTS)
        if self.num_requests and missing:
            return Plan(queued, Reason.HOLD_EXPIRED)
        return self._take(queued)

    @property
    def _return_seconds(self) -> float:
        return min(_RETURN_SECONDS, _RETURN_SHARE * self.costs.mean(1))

    def _target(self, rate: float, workers: int) -> int:
        """Return the smallest batch size that keeps workers stable at this rate.

        K workers that run batches of b, each in l(b) seconds, serve K·b/l(b) per second. Near their
        capacity it is the full size under a goal: small batches of workers that are idle by chance
        would use up the capacity. Without a goal the queue grows until batches are full.
        """
        mean, size = self.costs.mean, self.size
        load = rate * mean(size) / (workers * size)
        if load > _FULL_LOAD:
            return size if self.goal < math.inf else 1
        low, high = 0, size
        while high - low > 1:
            middle = (low + high) // 2
            if middle >= rate / workers * mean(middle):
                high = middle
            else:
                low = middle
        return high

    def _hold_until(self, queue: JobQueue, queued: int, target: int, rate: float) -> float:
        arrived = queue.oldest_arrival
        slack = queue.deadline_at(0) - arrived - self.costs.bound(queued + 1)
        if target == self.size:
            missing, share = target - 1, _PRESSED_HOLD_SHARE
        else:  # the more jobs are queued, the less the missing ones are worth
            missing, share = target - queued, _HOLD_SHARE
        until = arrived + min(self.max_hold, _HOLD_ARRIVALS * missing / rate)
        return min(until, arrived + share * slack)


class _ReturningClients:
    """Detects clients that send the next request as soon as they are answered (a closed loop)."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._until = -math.inf
        self._answered = 0
        self._returned = 0

    def begin(self, jobs: int, until: float) -> None:
        """Count the requests until then as those of the ``jobs`` answered clients."""
        if self._answered:
            share = min(1.0, self._returned / self._answered)
            self._share += _RETURN_STEP * (share - self._share)
        self._until, self._answered, self._returned = until, jobs, 0

    def count(self, now: float) -> None:
        """Count a request that arrives now."""
        if now <= self._until:
            self._returned += 1

    @property
    def missing(self) -> int:
        """Number of answered clients that are expected to return and have not yet."""
        return max(0, self._answered - self._returned) if self._share >= _RETURNING else 0


class _ArrivalRate:
    """The rate of arrivals, averaged with weights that fade exponentially."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._rate = 0.0
        self._seconds = 1.0

    def count(self, now: float) -> None:
        """Count an arrival now."""
        self._rate = 1.0 / self._seconds + self._faded(now)
        self._last = now

    def at(self, now: float, seconds: float) -> float:
        """Return arrivals per second over about ``seconds``; weights fade as fast from now on."""
        self._seconds = seconds
        return self._faded(now)

    def _faded(self, now: float) -> float:
        return self._rate * math.exp((self._last - now) / self._seconds)
