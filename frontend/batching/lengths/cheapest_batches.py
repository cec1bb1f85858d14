"""Cuts queued jobs into batches of similar lengths at the least cost."""

import math
from collections.abc import Sequence

from marserve.frontend.batching.lengths.length_costs import Row

# All sizes are tried if that takes no more steps than this; else some of them.
_MAX_STEPS = 1500
_SOME_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def cheapest_batches(lengths: Sequence[float], rows: Sequence[Row]) -> list[range]:
    """Cut rising lengths into batches, as ranges of indices, so that their total cost is least.

    Batches of jobs sorted by length are optimal: exchanging items of two batches for shorter ones
    in the batch of shorter items makes neither longer. Dynamic program: the best batches for the
    first n jobs are a last batch, and the best ones for the jobs before it. ``rows`` are the costs
    of batches of each size from 1 on.
    """
    if len(lengths) * len(rows) > _MAX_STEPS:
        largest = rows[-1][0]
        rows = [row for row in rows if row[0] in _SOME_SIZES or row[0] == largest]
    least, last = [0.0], [0]
    for count, longest in enumerate(lengths, 1):
        square = longest * longest
        best, size_of_best = math.inf, 1
        for size, p, q, r in rows:
            if size > count:
                break
            cost = least[count - size] + p + q * longest + r * square
            if cost < best:
                best, size_of_best = cost, size
        least.append(best)
        last.append(size_of_best)
    batches, end = [], len(lengths)
    while end:
        batches.append(range(end - last[end], end))
        end -= last[end]
    return batches
