"""The most requests that any scheduler could answer in time, with one worker, knowing the future.

A dynamic program over runs of requests. Deadlines follow arrivals, so there is a best schedule
whose batches are runs of neighbours in the order of arrival: where a batch leaves out a request
between two of its own, the first of the two can be exchanged for it (it is due later, and was there
when the last was), and where two batches cross, their requests can be sorted. Between the runs any
request may be left out.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def most_in_time(
    arrivals: Sequence[float] | NDArray[np.float64],
    goal: float,
    cost: Callable[[int], float],
    size: int,
    most_lost: int | None = None,
) -> int:
    """How many requests the best of all schedules answers by their deadline.

    ``earliest[j, d]`` is the earliest moment at which the worker can be free when, of the first
    ``j`` requests, ``d`` were left out and all others answered in time. Earlier is never worse, so
    one number per state is enough.

    Args:
        arrivals: Moments of arrival, ascending, seconds.
        goal: Seconds after its arrival at which a request is due.
        cost: Seconds a batch of n takes; must not fall with n.
        size: Most requests in a batch.
        most_lost: How many some schedule is known to lose: the best one loses no more. Saves time.
    """
    moments = np.asarray(arrivals, dtype=float)
    count = len(moments)
    lost = count if most_lost is None else most_lost
    earliest = np.full((count + 1, lost + 1), np.inf)
    earliest[0, 0] = 0.0
    costs = np.array([cost(n) for n in range(size, 0, -1)])[:, np.newaxis]  # of runs from j - size
    for j in range(1, count + 1):
        first = max(0, j - size)
        least = costs[size - (j - first) :]
        ends = np.maximum(earliest[first:j], moments[j - 1])
        ends += least
        # Within a run the first is due first.
        ends[ends > moments[first:j, np.newaxis] + goal + 1e-12] = np.inf
        np.min(ends, axis=0, out=earliest[j])
        np.minimum(earliest[j, 1:], earliest[j - 1, :-1], out=earliest[j, 1:])
    losses = np.flatnonzero(np.isfinite(earliest[count]))
    if not len(losses):
        raise ValueError(f"no schedule loses as few as {most_lost}")
    return count - int(losses[0])
