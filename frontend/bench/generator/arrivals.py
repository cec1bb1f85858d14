"""When the requests of an open loop are due: known beforehand, never slowed by the server."""

import random
from collections.abc import Iterator

from marserve.frontend.bench.generator.load import Load


def due_moments(load: Load) -> Iterator[float]:
    """Yields seconds from the start of the load, rising, for ever."""
    assert load.rate is not None
    if load.arrivals == "uniform":
        yield from _uniform(load.rate, load.offset)
    else:
        yield from _poisson(load.rate, load.seed)


def _uniform(rate: float, offset: float) -> Iterator[float]:
    count = 0
    while True:
        yield offset + count / rate  # not a sum of distances: rounding would add up
        count += 1


def _poisson(rate: float, seed: int) -> Iterator[float]:
    # The distances of a Poisson process are exponentially distributed.
    distances, moment = random.Random(seed), 0.0  # noqa: S311  no secret
    while True:
        moment += distances.expovariate(rate)
        yield moment
