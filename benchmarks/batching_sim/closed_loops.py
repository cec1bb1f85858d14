"""Clients that send their next request when they have the answer, from some milliseconds away.

    python benchmarks/batching_sim --groups closed [--seeds report]

The same clients split into groups that take turns, unless the batcher waits for those that were
just answered. The best policy depends on the distance and on the costs; each policy is compared
with the best of several fixed windows.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from clients import ClosedLoop
from contenders import ADAPTIVE, COLD, TAKE_ALL, fixed_window, with_known_clients
from engine import Contender, Simulation
from groups import FIRST_SEED
from outcome import Outcome
from profiles import FLAT, GPU, Profile, Service
from report import print_table

#: The name of this group.
NAME = "closed"
CLIENTS = (4, 16, 64)
AWAY_SECONDS = (0.0005, 0.001, 0.003, 0.010)
_WINDOWS = (0.001, 0.002, 0.004, 0.008, 0.015)
_NOISE = 0.05
_REPETITIONS, _REQUESTS = 2, 4000
#: A handler that is as short as the way back.
SHORT = Profile("short", 0.00005, 0.001, 32, 0.050)


def rate(contender: Contender, service: Service, clients: int, away: float, total: int) -> float:
    """Answers per second, without the first quarter."""
    simulation = Simulation(contender, service)
    outcome = simulation.run(
        ClosedLoop(simulation.loop, service.profile.goal, clients, total, away)
    )
    return _rate_of(outcome.after(total // 4))


def _rate_of(outcome: Outcome) -> float:
    ends = (outcome.arrived + outcome.latency)[np.isfinite(outcome.latency)]
    return len(ends) / float(ends.max() - outcome.arrived.min())


def print_all(seeds: str, repetitions: int | None, requests: int | None) -> None:
    """A table for each model, and the shares of the best window's throughput over all cases."""
    first = FIRST_SEED[seeds]
    some = range(first, first + (repetitions or _REPETITIONS))
    shares: dict[str, list[float]] = {}
    for profile in (GPU, FLAT, SHORT):
        rows = []
        for clients, away in product(CLIENTS, AWAY_SECONDS):
            known = replace(with_known_clients(clients), name="num_requests")
            ours = (TAKE_ALL, ADAPTIVE, COLD, known)
            windows = [fixed_window(seconds) for seconds in _WINDOWS]
            rates = {
                one.name: _mean(one, profile, clients, away, some, requests or _REQUESTS)
                for one in (*ours, *windows)
            }
            best = max(rates.values())
            for one in ours:
                shares.setdefault(one.name, []).append(rates[one.name] / best)
            window = max(rates[one.name] for one in windows)
            cells = (f"{rates[one.name]:.0f}" for one in ours)
            rows.append((f"{clients} clients, {1000 * away:g} ms", *cells, f"{window:.0f}"))
        headings = ("answers per second", *shares, "best window")
        print_table(f"Closed loops, {profile.name}", headings, rows)
    rows = [(name, f"{np.mean(each):.3f}", f"{min(each):.2f}") for name, each in shares.items()]
    print_table("Closed loops, share of the best", ("policy", "mean", "worst"), rows)


def _mean(
    one: Contender, profile: Profile, clients: int, away: float, seeds: Sequence[int], total: int
) -> float:
    rates = [rate(one, Service(profile, _NOISE, seed=seed), clients, away, total) for seed in seeds]
    return float(np.mean(rates))
