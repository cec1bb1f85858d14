"""The moments when the requests of an open loop are due, fixed before the run."""

import random
from array import array
from collections.abc import Iterator

from marserve.tools.bench.generator.load import Load


def due_moments(load: Load) -> "array[float]":
    """Return all moments of a load in ascending order, seconds from its start.

    The measured part has exactly rate times length requests. Random arrivals are distributed
    uniformly over it: a Poisson process conditioned on the number of arrivals. Without the
    randomness of this number, runs of seconds are comparable with each other and with the rate.
    """
    assert load.rate is not None
    if load.arrivals == "uniform":
        return array("d", _evenly(load, load.rate))
    return array("d", _at_random(load, load.rate))


def _evenly(load: Load, rate: float) -> Iterator[float]:
    # Multiples, not sums, in which rounding errors would accumulate.
    for index in range(round(load.warm_up * rate)):
        yield load.offset + index / rate
    for index in range(load.measured_requests):
        yield load.warm_up + load.offset + index / rate


def _at_random(load: Load, rate: float) -> Iterator[float]:
    uniform = random.Random(load.seed).uniform  # noqa: S311  no secret
    yield from sorted(uniform(0, load.warm_up) for _ in range(round(load.warm_up * rate)))
    count = load.measured_requests
    end = load.warm_up + count / rate
    yield from sorted(uniform(load.warm_up, end) for _ in range(count))
