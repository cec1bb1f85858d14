"""Which jobs of a queue form batches of about one length, so that little of them is padding."""

import math
from collections.abc import Sequence

from marserve.frontend.batching.lengths.length_costs import Row

# All sizes are tried while that takes no more steps than this; else some of them.
_MAX_STEPS = 1500
_SOME_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def cheapest_batches(lengths: Sequence[float], rows: Sequence[Row]) -> list[range]:
    """Cut rising lengths into batches, as ranges of places, so that all of them cost the least.

    Batches of jobs sorted by length are the best there are: exchanging items of two batches for
    shorter ones in the batch of shorter items never makes either longer. The optimum is found step
    by step: the best for the first n jobs is a last batch, and the best for those before it.

    Args:
        lengths: Of the jobs, rising; not empty.
        rows: What batches of each size cost, for 1 and all larger sizes, rising.
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
