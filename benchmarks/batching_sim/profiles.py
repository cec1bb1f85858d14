"""What a batch costs on four kinds of hardware, and how an imagined worker departs from it."""

import math
import random
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Profile:
    """A model on some hardware: a batch of n takes ``beta + alpha * n`` seconds.

    Attributes:
        name: How the tables call it.
        alpha: Seconds for each request of a batch.
        beta: Seconds for the batch itself.
        size: Most requests in a batch.
        goal: Seconds within which an answer is of use.
    """

    name: str
    alpha: float
    beta: float
    size: int
    goal: float

    def cost(self, size: int) -> float:
        """Seconds that a batch takes."""
        return self.beta + self.alpha * size

    def capacity(self, workers: int = 1) -> float:
        """Requests per second that can be answered when all batches are full."""
        return workers * self.size / self.cost(self.size)


#: The profiles of the design study: a GPU, the same with a goal that hurts, a CPU where batching
#: hardly pays, and an accelerator where the size of a batch hardly matters.
PROFILES = (
    Profile("gpu", 0.00035, 0.004, 32, 0.050),
    Profile("tight", 0.00035, 0.004, 32, 0.020),
    Profile("cpu", 0.012, 0.008, 8, 0.300),
    Profile("flat", 0.0001, 0.020, 64, 0.100),
)
GPU = PROFILES[0]


@dataclass
class Service:
    """What batches really take: the profile, with noise, and a drift from some moment on.

    Args:
        profile: What they take on average.
        noise: Sigma of the lognormal factor on each batch, whose mean is 1.
        drift: Factor on all that starts after `drifts_at`.
        drifts_at: Seconds from the start.
        seed: Of the noise.
    """

    profile: Profile
    noise: float = 0.0
    drift: float = 1.0
    drifts_at: float = math.inf
    seed: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def seconds(self, size: int, now: float = 0.0) -> float:
        """What a batch that starts now will take."""
        seconds = self.profile.cost(size)
        if self.noise:
            seconds *= self._random.lognormvariate(-(self.noise**2) / 2, self.noise)
        return seconds * self.drift if now >= self.drifts_at else seconds
