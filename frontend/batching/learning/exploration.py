"""Exploration: under backlog, a few batches have other sizes, to learn their costs.

Under backlog all batches have the largest size, so the size of the best throughput stays unknown.
So while enough jobs are queued, some batches have another size:

* Only sizes that may be better are tried. A size costs no less than smaller ones; if it would be
  the best at a cost half-way between that and a straight line, it may be better. Above the best
  size it may be, too, if costs are even and rise on as they do below. Of several such sizes between
  two that were seen, the middle one is tried.
* A size is tried until its cost is known, or until it is worse than the best by more than noise.
* The loss, compared with batches of the best size, is limited to a share of the workers' time.
* Sizes near the present one are tried again later, in case costs have changed, or the first batch
  of a size was slow because code was compiled.

Sizes above all that were seen need no exploration: under backlog they occur anyway.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.learning.buckets import FIRST_SAMPLES, Point, bucket_of
from marserve.frontend.batching.learning.latency_model import LatencyModel
from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.policies import Plan

# The share of the workers' time that exploration may lose, and how many batches of the present size
# it may lose at first.
_LOST_SHARE = 0.03
_LOST_AT_FIRST = 3.0
# A size that was not seen is tried if it may have this many times the best throughput.
_MIN_GAIN = 1.05
# The number of standard errors by which a size may be better than its batches so far.
_DOUBT = 2.0
# The next size is chosen after this number of batches; sooner after the first batches of a size.
_BATCHES_LOOKED_AT = 8
_FIRST_BATCHES = 3
# Sizes that differ from the present one by up to this factor are tried again after these seconds of
# the workers' time, twice as many each time, and after this number of batches.
_NEAR = 2.0
_AGAIN_SECONDS = 2.0
_MAX_AGAIN_SECONDS = 60.0
_AGAIN_BATCHES = 100
# A size that is tried again has become cheaper if a batch differs by this factor.
_CHEAPER = 1.25


class _Candidate(NamedTuple):
    """A size that may be better; ``below`` is the next smaller size that was seen, 0 for none."""

    size: int
    throughput: float
    below: float


class _Tried(NamedTuple):
    """The workers' seconds and the batches before a size was tried; the pause after it."""

    busy: float
    batches: int
    pause: float


_NEVER = _Tried(0.0, 0, _AGAIN_SECONDS)


class Exploration:
    """Chooses the ``size`` that is tried under backlog, 0 for none, by the learnt costs."""

    def __init__(self, costs: LatencyModel) -> None:
        self.size = 0
        self.lost = 0.0
        self._costs = costs
        #: Seconds of the workers, number of batches, and the size of the largest one.
        self._busy = 0.0
        self._batches = self._seen = 0
        self._tried: dict[int, _Tried] = {}
        #: Number of batches when the present size was chosen; the seconds of its fastest batch.
        self._chosen_at = 0
        self._least = math.inf

    def reconfigure(self, batching: Batching) -> None:
        """Apply new settings, under which other sizes may pay."""
        self._batching = batching
        self._sizes = batching.sizes_to_try
        self.size = 0
        self._tried.clear()
        self._seen = max((bucket_of(round(each.size)) for each in self._costs.points), default=0)

    def limit(self, largest: int) -> None:
        """Do not try sizes above this one."""
        if self.size > largest:
            self.size = 0

    def change(self, plan: Plan, now: float, queue: JobQueue, size: int) -> Plan:
        """Return the plan with the size that is tried, if there are enough jobs; else the plan.

        ``size`` is the largest batch at present. Jobs that a larger one would delay too much are
        refused.
        """
        tried, shed = self.size, plan.shed
        # Clients that wait for their answers may take turns in two groups, so that no batch is
        # full: the jobs that a smaller batch leaves behind count as backlog.
        is_backlog = plan.take > tried or plan.take >= size or shed
        if not is_backlog or not min(tried, size) <= plan.take <= self._seen:
            return plan
        last_shed = queue.sharing_count - tried
        if tried > size and self._batching.keeps_deadlines:
            ends = now + self._costs.mean(tried)
            while shed <= last_shed and queue.deadline_at(shed) < ends:
                shed += 1
        return Plan(tried, Reason.EXPLORATION, shed) if shed <= last_shed else plan

    def learn(self, batch: Batch, seconds: float, size: int, largest: int) -> bool:
        """Learn from a batch whose cost was observed; return whether the largest size may change.

        ``size`` is the largest batch at present, ``largest`` its limit without costs.
        """
        if not self._batching.explores:
            return False
        self._busy += seconds
        self._batches += 1
        self._seen = max(self._seen, batch.run_as)
        count = self._costs.batches_of(batch.run_as)
        is_trial = self.size == batch.run_as and batch.reason is Reason.EXPLORATION
        if is_trial:
            self.lost += max(0.0, seconds - batch.run_as / self._best)
            if self._is_settled(batch, seconds):
                self._note_tried(self.size)
            elif self._has_budget(size):
                return False
        elif self.size and self._batches - self._chosen_at > _AGAIN_BATCHES:
            self._note_tried(self.size)  # there were never enough jobs
        elif count > _FIRST_BATCHES and self._batches % _BATCHES_LOOKED_AT:
            return False
        chosen = self._choose(size, largest)
        if chosen != self.size or is_trial:
            self.size, self._chosen_at, self._least = chosen, self._batches, math.inf
        return is_trial or count <= _FIRST_BATCHES

    def _is_settled(self, batch: Batch, seconds: float) -> bool:
        """Return whether the cost of the size is known, or the size not good enough."""
        costs, size = self._costs, self.size
        if size in self._tried and batch.predicted > _CHEAPER * seconds:
            costs.forget(size, seconds)
            del self._tried[size]
        self._least = min(self._least, seconds)
        return costs.knows(size) or size / self._least * self._doubt() < self._best

    def _note_tried(self, size: int) -> None:
        before = self._tried.get(size)
        pause = min(2 * before.pause, _MAX_AGAIN_SECONDS) if before else _AGAIN_SECONDS
        self._tried[size] = _Tried(self._busy, self._batches, pause)

    @property
    def _best(self) -> float:
        return max(point.size / point.seconds for point in self._costs.observed_points)

    def _doubt(self, batches: int = 1) -> float:
        """Return the factor by which a size may be better than these batches of it."""
        return 1.0 + _DOUBT * self._costs.deviation / math.sqrt(batches)

    def _has_budget(self, size: int) -> bool:
        return self.lost <= _LOST_AT_FIRST * self._costs.mean(size) + _LOST_SHARE * self._busy

    # -- choosing ----------------------------------------------------------------------------------

    def _choose(self, size: int, largest: int) -> int:
        """Return the next size to try; 0 for none."""
        if not self._has_budget(size):
            return 0
        # Those between the largest seen and the present one occur anyway, if the goal allows.
        sizes = [each for each in self._sizes if each <= min(largest, _NEAR * size)]
        sizes = [each for each in sizes if each < self._seen or each > size]
        if not sizes:
            return 0
        smallest = self._costs.batches_of(sizes[0])
        if self._batching.is_automatic and smallest < FIRST_SAMPLES:
            return sizes[0]  # the gain of batching is relative to it
        candidates = self._candidates(sizes)
        if not candidates:
            return self._choose_again(sizes, size)
        best = max(candidates, key=attrgetter("throughput"))
        if not best.below:
            return sizes[0]
        beside = [each.size for each in candidates if each.below == best.below]
        return beside[(len(beside) - 1) // 2]

    def _candidates(self, sizes: Sequence[int]) -> list[_Candidate]:
        """Return the sizes of unknown cost that may be better than all that were seen."""
        points = self._costs.observed_points
        seen = {bucket_of(round(point.size)): point for point in points}
        best, candidates = self._best, []
        for size in sizes:
            if size in self._tried or self._costs.knows(size):
                continue
            point, enough = seen.get(bucket_of(size)), best
            if point is not None:
                seconds, below = point.seconds / self._doubt(point.batches), float(size)
            else:
                seconds, below = _hopeful_cost(size, points, self._costs.is_even)
                enough *= _MIN_GAIN
            throughput = size / seconds if seconds else math.inf
            if throughput >= enough and seconds <= self._batching.goal:
                candidates.append(_Candidate(size, throughput, below))
        return candidates

    def _choose_again(self, sizes: Sequence[int], size: int) -> int:
        """Return a size near the present one that was not tried lately; 0 for none."""
        for each in sizes:
            busy, batches, pause = self._tried.get(each, _NEVER)
            is_due = self._busy - busy > pause and self._batches - batches > _AGAIN_BATCHES
            if is_due and each != size and each >= size / _NEAR:
                self._tried.setdefault(each, _NEVER)
                return each
        return 0


def _hopeful_cost(size: int, points: Sequence[Point], is_even: bool) -> tuple[float, float]:
    """Return the possible cost of a size that was not seen, and the next smaller size seen.

    It is the geometric mean of the least possible cost, that of the smaller size, and the cost on a
    straight line between the adjacent sizes. Next to the best size seen, the costs may jump between
    the two; there, of even costs, it is no more than the line through the two next smaller sizes
    gives. Both are 0 if no smaller size was seen.
    """
    costs: list[tuple[float, float]] = []  # those of the points, made to rise with the size
    most = math.inf
    for point in reversed(points):
        most = min(most, point.seconds)
        costs.append((point.size, most))
    costs.reverse()
    index = bisect_left(costs, (float(size), 0.0))
    if not index:
        return 0.0, 0.0
    below, least = costs[index - 1]
    if index == len(costs):
        return least, below
    above, most = costs[index]
    straight = least + (most - least) * (size - below) / (above - below)
    hopeful = math.sqrt(least * straight)
    if is_even and index > 1 and below / least >= max(n / seconds for n, seconds in costs):
        before, seconds = costs[index - 2]
        slope = (least - seconds) / (below - before)
        hopeful = min(hopeful, least + slope * (size - below))
    return hopeful, below
