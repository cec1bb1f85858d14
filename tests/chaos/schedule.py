"""Which actions a run takes, in which order, and with which choices: a pure function of the seed.

Actions come from a bag that holds each of them as often as its weight says, and is shuffled and
filled again: so all of them occur even in a short run. Each has a random generator of its own for
its choices. When it meets which request is up to the machine.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_PAUSES = (0.05, 1.2)  # seconds between two actions


@dataclass(frozen=True)
class Step:
    """An action that is due, and the seed of its choices."""

    number: int
    pause: float
    action: str
    seed: str

    @property
    def rng(self) -> random.Random:
        """For the choices of the action."""
        return random.Random(self.seed)


def steps(seed: int, weights: Mapping[str, int]) -> Iterator[Step]:
    """The steps of a run, without end."""
    rng = random.Random(f"schedule {seed}")
    number = 0
    while True:
        bag = [name for name, weight in weights.items() for _ in range(weight)]
        rng.shuffle(bag)
        for name in bag:
            yield Step(number, rng.uniform(*_PAUSES), name, f"{seed} {number} {name}")
            number += 1
