"""The most requests that any scheduler could answer in time, knowing the future.

`most_in_time` is exact for one worker whose costs are known: a dynamic program over runs of
requests. Deadlines follow arrivals, so there is a best schedule whose batches are runs of
neighbours in the order of arrival: where a batch leaves out a request between two of its own, the
first of the two can be exchanged for it (it is due later, and was there when the last was), and
where two batches cross, their requests can be sorted. Between the runs any request may be left out.
The cost of a batch may rise with its size in any way.

`fluid_bound` is for several workers: nobody answers more, and perhaps nobody answers as many.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from profiles import Pause

_EPSILON = 1e-12
Moments = Sequence[float] | NDArray[np.float64]
Cost = Callable[[int], float]


def most_in_time(
    arrivals: Moments,
    goal: float,
    cost: Cost,
    size: int,
    most_lost: int | None = None,
    pauses: Sequence[Pause] = (),
) -> int:
    """How many requests the best of all schedules answers by their deadline.

    ``earliest[j, d]`` is the earliest moment at which the worker can be free when, of the first
    ``j`` requests, ``d`` were left out and all others answered in time. Earlier is never worse, so
    one number per state is enough; and where the worker is free before the next request comes, it
    is no use to have lost more. Only the rows of the last ``size`` requests are kept.

    Args:
        arrivals: Moments of arrival, ascending, seconds.
        goal: Seconds after its arrival at which a request is due.
        cost: Seconds a batch of n takes; must not fall with n.
        size: Most requests in a batch.
        most_lost: How many some schedule is known to lose: the best one loses no more. Saves time.
        pauses: In which the worker stands still.
    """
    moments = np.asarray(arrivals, dtype=float)
    due = working_time(moments + goal, pauses)
    moments = working_time(moments, pauses)
    count = len(moments)
    lost = count if most_lost is None else most_lost
    rows = size + 1
    earliest = np.full((rows, lost + 1), np.inf)
    earliest[0, 0] = 0.0
    lows, highs = np.zeros(count + 1, int), np.ones(count + 1, int)  # what is finite in each row
    costs = np.array([cost(n) for n in range(size, 0, -1)])[:, np.newaxis]  # of runs from j - size
    for j in range(1, count + 1):
        first = max(0, j - size)
        low, high = lows[first:j].min(), min(lost + 1, highs[first:j].max() + 1)
        ends = np.maximum(earliest[np.arange(first, j) % rows, low:high], moments[j - 1])
        ends += costs[size - (j - first) :]
        # Within a run the first is due first.
        ends[ends > due[first:j, np.newaxis] + _EPSILON] = np.inf
        row = earliest[j % rows]
        row[:] = np.inf
        np.min(ends, axis=0, out=row[low:high])
        left_out = earliest[(j - 1) % rows]
        start = max(1, low)
        np.minimum(row[start:high], left_out[start - 1 : high - 1], out=row[start:high])
        finite = np.flatnonzero(np.isfinite(row[low:high]))
        if not len(finite):
            raise ValueError(f"no schedule loses as few as {most_lost}")
        lows[j] = low + finite[0]
        highs[j] = low + finite[-1] + 1
        if j < count:
            idle = np.flatnonzero(row[lows[j] : highs[j]] <= moments[j])
            if len(idle):
                highs[j] = lows[j] + idle[0] + 1
                row[highs[j] :] = np.inf
    return int(count - lows[count])


def fluid_bound(
    arrivals: Moments,
    goal: float,
    cost: Cost,
    size: int,
    workers: int,
    pauses: Sequence[Pause] = (),
) -> int:
    """A number of requests that no schedule for several workers exceeds.

    A batch of n takes ``cost(n)`` of one worker's time, so each of its requests takes at least
    ``c``, the least ``cost(n) / n`` of all batches that are possible: n requests can only share a
    batch if the last has come ``cost(n)`` before the first is due. Let this work be done in any
    pieces, by all workers at once (which is ``c / workers`` seconds of a machine that does all they
    can do), at any time between the arrival and the deadline. Every real schedule is such a one; so
    the best of these answers as many at least. All pieces being equal and deadlines following
    arrivals, the best is to work in the order of arrival and to leave out what would be late.
    """
    moments = np.asarray(arrivals, dtype=float)
    if cost(1) > goal + _EPSILON:
        return 0
    least = cost(1)
    for n in range(2, min(size, len(moments)) + 1):
        spans = moments[n - 1 :] - moments[: len(moments) - n + 1]
        if cost(n) + spans.min() <= goal + _EPSILON:
            least = min(least, cost(n) / n)
    due = working_time(moments + goal, pauses).tolist()
    moments = working_time(moments, pauses).tolist()
    free, answered = 0.0, 0
    for arrival, deadline in zip(moments, due, strict=True):
        end = max(free, arrival) + least / workers
        if end <= deadline + _EPSILON:
            free, answered = end, answered + 1
    return answered


def working_time(moments: NDArray[np.float64], pauses: Sequence[Pause]) -> NDArray[np.float64]:
    """The same moments on a clock that stands still in the pauses.

    On this clock work takes what it takes without pauses, and is in time for the same deadlines.
    """
    paused = np.zeros_like(moments)
    for pause in pauses:
        paused += np.clip(moments - pause.start, 0.0, pause.seconds)
    return moments - paused
