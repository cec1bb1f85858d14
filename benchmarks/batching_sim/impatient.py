"""Overload by clients with individual deadlines: the share answered, and streaks of refusals.

    python benchmarks/batching_sim --groups deadlines [--seeds report]

Each client sends requests at random (Poisson). Its deadline is between half of the latency goal
and twice the goal. A policy that favours some clients starves the others.
"""

from itertools import groupby, product

import numpy as np
from clients import OpenLoop, Request
from contenders import ADAPTIVE, COLD, REFUSE_BY_MEAN, TAKE_LIVING
from engine import Contender, Simulation
from groups import FIRST_SEED
from numpy.typing import NDArray
from profiles import FLAT, GPU, SLOW, Profile, Service
from report import print_table
from workloads import poisson

#: The name of this group.
NAME = "deadlines"
_CLIENTS = 50
_REPETITIONS, _REQUESTS = 2, 5000
_NOISE = 0.1


class ImpatientClients(OpenLoop):
    """Clients of an open loop, with individual deadlines from half to twice the goal.

    Attributes:
        of: The client of each request.
    """

    def set_up(self, seed: int) -> None:
        """Draw the client of each request."""
        self.of = np.random.default_rng(seed).integers(0, _CLIENTS, len(self.arrivals))
        self._patience = self.goal * np.linspace(0.5, 2.0, _CLIENTS)

    def prepare(self, request: Request) -> None:
        """See `Clients.prepare`."""
        client = self.of[len(self.requests) - 1]
        request.deadline = request.arrived + float(self._patience[client])


def run(
    contender: Contender, profile: Profile, load: float, seed: int, requests: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Whether each request was answered in time, and its client."""
    moments = poisson(load * profile.capacity(), requests, seed)
    simulation = Simulation(contender, Service(profile, _NOISE, seed=seed))
    clients = ImpatientClients(simulation.loop, profile.goal, moments)
    clients.set_up(seed)
    return simulation.run(clients).good, clients.of


def longest_streak(good: NDArray[np.bool_]) -> int:
    """The most requests in a row that were not answered in time."""
    return max((len([*some]) for is_good, some in groupby(good) if not is_good), default=0)


def print_all(seeds: str, repetitions: int | None, requests: int | None) -> None:
    """A table of all policies, means over models, loads and seeds."""
    first = FIRST_SEED[seeds]
    some = range(first, first + (repetitions or _REPETITIONS))
    rows = []
    for contender in (TAKE_LIVING, REFUSE_BY_MEAN, ADAPTIVE, COLD):
        shares, least, streaks = [], [], []
        for profile, load, seed in product((GPU, FLAT, SLOW), (0.9, 1.2, 1.5), some):
            good, of = run(contender, profile, load, seed, requests or _REQUESTS)
            each = [good[of == client] for client in range(_CLIENTS)]
            shares.append(good.mean())
            least.append(min(one.mean() for one in each))
            streaks += [longest_streak(one) for one in each]
        figures = (100 * np.mean(shares), 100 * np.mean(least), np.mean(streaks), max(streaks))
        rows.append((contender.name, *(f"{figure:.1f}" for figure in figures)))
    headings = ("policy", "answered in time %", "worst client %", "longest streak", "worst client")
    print_table(f"Overload, {_CLIENTS} clients with deadlines", headings, rows)
