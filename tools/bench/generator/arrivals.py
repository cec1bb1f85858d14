"""When the requests of an open loop are due: known beforehand, never slowed by the server."""

import random
from array import array
from collections.abc import Iterator

from marserve.tools.bench.generator.load import Load


def due_moments(load: Load) -> "array[float]":
    """All moments of a load, rising: seconds from its start.

    The measured part has exactly as many requests as its rate and length say. Where they come at
    random, their moments are uniformly distributed over it: that is a Poisson process of which the
    number of arrivals is known, and without the luck of that number two runs, or a throughput and
    the rate that was asked for, can be compared after seconds rather than hours.
    """
    assert load.rate is not None
    if load.arrivals == "uniform":
        return array("d", _evenly(load, load.rate))
    return array("d", _at_random(load, load.rate))


def _evenly(load: Load, rate: float) -> Iterator[float]:
    # Multiples, not sums: rounding would add up.
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
