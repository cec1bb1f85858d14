"""What a batch costs on several kinds of hardware, and how an imagined worker departs from it."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Profile:
    """A model on some hardware: a batch of n takes ``beta + alpha * n ** power`` seconds.

    Attributes:
        name: How the tables call it.
        alpha: Seconds for each request of a batch.
        beta: Seconds for the batch itself.
        size: Most requests in a batch.
        goal: Seconds within which an answer is of use.
        power: Above 1 the cost is convex: beyond some size larger batches have less throughput.
        cliff: The largest batch that fits (into a cache); larger ones take `jump` seconds more.
        jump: See `cliff`.
    """

    name: str
    alpha: float
    beta: float
    size: int
    goal: float
    power: float = 1.0
    cliff: int = 1_000_000
    jump: float = 0.0

    def cost(self, size: int) -> float:
        """Seconds that a batch takes."""
        seconds = self.beta + self.alpha * size**self.power
        return seconds + self.jump if size > self.cliff else seconds

    def capacity(self, workers: int = 1) -> float:
        """Requests per second that can be answered when all batches have the best size."""
        return workers * max(n / self.cost(n) for n in range(1, self.size + 1))

    @cached_property
    def line(self) -> tuple[float, float]:
        """The costs as a straight line: seconds per request, and per batch."""
        if self.power == 1.0 and self.cliff >= self.size:
            return self.alpha, self.beta
        sizes = range(1, self.size + 1)
        slope, start = np.polyfit(sizes, [self.cost(n) for n in sizes], 1)
        return float(slope), max(0.0, float(start))


#: The profiles of the design study: a GPU, the same with a goal that hurts, a CPU where batching
#: hardly pays, and an accelerator where the size of a batch hardly matters.
PROFILES = (
    Profile("gpu", 0.00035, 0.004, 32, 0.050),
    Profile("tight", 0.00035, 0.004, 32, 0.020),
    Profile("cpu", 0.012, 0.008, 8, 0.300),
    Profile("flat", 0.0001, 0.020, 64, 0.100),
)
GPU, TIGHT, CPU, FLAT = PROFILES
#: A model whose goal is four times the mean time of a small batch: with a tail it is often missed.
SLOW = Profile("slow", 0.0035, 0.040, 32, 0.200)
#: Costs that are not a line. Full batches have two thirds of the best throughput or so.
CLIFFS = (
    Profile("cliff", 0.00035, 0.004, 32, 0.050, cliff=16, jump=0.015),
    Profile("tight cliff", 0.00035, 0.004, 32, 0.030, cliff=16, jump=0.012),
)
CONVEX = (
    Profile("n^1.5", 0.00015, 0.004, 32, 0.050, power=1.5),
    Profile("n^2", 0.00002, 0.004, 32, 0.050, power=2.0),
)
ALL_PROFILES = (*PROFILES, SLOW, *CLIFFS, *CONVEX)


# Of batches whose costs are bimodal.
_SLOW_SHARE = 0.1
# How long a worker may run on a machine with other work before it waits again, seconds.
_TIME_SLICE = 0.010


@dataclass(frozen=True)
class Pause:
    """All workers stop: garbage is collected, memory paged, the machine suspended.

    Attributes:
        start: The moment, seconds.
        seconds: How long.
    """

    start: float
    seconds: float


@dataclass(frozen=True)
class Slowdown:
    """All workers are slower: a machine that throttles, or that others use as well.

    Attributes:
        start: The moment, seconds.
        factor: On all batches that start in this time.
        seconds: How long.
    """

    start: float
    factor: float
    seconds: float = math.inf


@dataclass
class Service:
    """What batches really take: the profile, with noise, pauses and slowdowns.

    Args:
        profile: What they take on average.
        noise: Sigma of the lognormal factor on each batch, whose mean is 1.
        slowdowns: They do not overlap.
        seed: Of the noise.
        pareto: Shape of the Pareto factor on each batch, whose mean is 1; above 1, or 0 for none.
        pauses: Ascending; they do not overlap.
        bimodal: A random tenth of the batches takes this many times as long as the others; the
            mean is that of the profile. 1: all take the same.
        waits: Mean seconds for which a worker waits for a processor, at first and after each time
            slice; there are other processes.
    """

    profile: Profile
    noise: float = 0.0
    seed: int = 0
    pareto: float = 0.0
    pauses: Sequence[Pause] = ()
    slowdowns: Sequence[Slowdown] = ()
    bimodal: float = 1.0
    waits: float = 0.0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def seconds(self, size: int, now: float = 0.0) -> float:
        """What a batch that starts now will take."""
        seconds = self.working_seconds(size)
        for slow in self.slowdowns:
            if slow.start <= now < slow.start + slow.seconds:
                seconds *= slow.factor
        for pause in self.pauses:
            if now < pause.start + pause.seconds and pause.start < now + seconds:
                seconds += pause.start + pause.seconds - max(now, pause.start)
        return seconds

    def working_seconds(self, size: int) -> float:
        """What a batch would take without pauses and slowdowns."""
        seconds = self.profile.cost(size)
        if self.noise:
            seconds *= self._random.lognormvariate(-(self.noise**2) / 2, self.noise)
        if self.pareto:
            seconds *= self._random.paretovariate(self.pareto) * (1 - 1 / self.pareto)
        if self.bimodal > 1:
            seconds /= 1 + _SLOW_SHARE * (self.bimodal - 1)
            seconds *= self.bimodal if self._random.random() < _SLOW_SHARE else 1.0
        if self.waits:
            slices = 1 + int(seconds / _TIME_SLICE)
            seconds += sum(self._random.expovariate(1 / self.waits) for _ in range(slices))
        return seconds
