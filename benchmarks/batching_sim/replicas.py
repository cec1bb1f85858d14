"""What splitting a queue costs: replicas with queues of their own, or one queue for all workers.

    python benchmarks/batching_sim --groups replicas [--seeds report]

Each replica is a batcher of the production with one worker; a balancer sends each request to one of
them. It is compared with one batcher that has as many workers. Loads are shares of what full
batches could serve; requests come by chance (Poisson). The balancer knows how many requests each
replica has, as one that forwards all of them does; several balancers would know their own only.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, product

import numpy as np
from clients import OpenLoop, Request
from contenders import ADAPTIVE, SHORT_WINDOW, TAKE_ALL
from engine import Contender, Simulation
from groups import FIRST_SEED
from outcome import Outcome
from profiles import CPU, GPU, TIGHT, Profile, Service, Slowdown
from report import print_table
from virtual_time import VirtualLoop
from workloads import poisson

from marserve.frontend.serving.fullness import Fullness, Use

#: Of this group, among the others.
NAME = "replicas"
CENTRAL = "one queue"
LOADS = (0.5, 0.8, 0.9, 0.95)
POLICIES = (SHORT_WINDOW, TAKE_ALL, ADAPTIVE)
_REQUESTS_EACH, _MOST_REQUESTS, _REPETITIONS = 2000, 20_000, 3
_BLOCK = 8
_LOOK_SECONDS = 0.5
_SLOWER = 3.0

#: Chooses a replica for a request.
Route = Callable[[], Simulation]
Router = Callable[[Sequence[Simulation], random.Random], Route]


def at_random(replicas: Sequence[Simulation], rng: random.Random) -> Route:
    """Any; what many clients that look a name up get, and Kubernetes' service."""
    return lambda: rng.choice(replicas)


def round_robin(replicas: Sequence[Simulation], _rng: random.Random) -> Route:
    """One after the other."""
    numbers = count()
    return lambda: replicas[next(numbers) % len(replicas)]


def two_choices(replicas: Sequence[Simulation], rng: random.Random) -> Route:
    """The one with fewer requests of two at random."""
    few = min(2, len(replicas))
    return lambda: min(rng.sample(replicas, few), key=_in_flight)


def least_requests(replicas: Sequence[Simulation], rng: random.Random) -> Route:
    """The one with the fewest requests: HAProxy's leastconn, join the shortest queue."""
    return lambda: min(replicas, key=lambda each: (each.in_flight, rng.random()))


def least_seconds(replicas: Sequence[Simulation], rng: random.Random) -> Route:
    """The one that expects to answer first; knows batches, and what they cost."""
    return lambda: min(replicas, key=lambda each: (each.expected_seconds, rng.random()))


def in_blocks(replicas: Sequence[Simulation], rng: random.Random) -> Route:
    """Eight in a row to the one that has the fewest, so that they can be a batch."""
    choose, numbers = least_requests(replicas, rng), count()
    chosen = replicas[0]

    def route() -> Simulation:
        nonlocal chosen
        if not next(numbers) % _BLOCK:
            chosen = choose()
        return chosen

    return route


ROUTERS: dict[str, Router] = {
    "random": at_random,
    "round robin": round_robin,
    "two choices": two_choices,
    "least requests": least_requests,
    "least seconds": least_seconds,
    "blocks of 8": in_blocks,
}


def passing_over_full(router: Router, goal: float) -> Router:
    """The same, but it looks twice a second which replicas are full, as /ready?model= says."""

    def make(replicas: Sequence[Simulation], rng: random.Random) -> Route:
        fullness = {replica: Fullness() for replica in replicas}
        routes: dict[tuple[Simulation, ...], Route] = {}
        route, looks_at = router(replicas, rng), 0.0

        def is_full(replica: Simulation) -> bool:
            uses = Use(replica.share_taken, "queue"), Use(replica.expected_seconds / goal, "goal")
            return bool(fullness[replica].reason(*uses))

        def choose() -> Simulation:
            nonlocal route, looks_at
            now = replicas[0].loop.now
            if now >= looks_at:
                looks_at = now + _LOOK_SECONDS
                ready = tuple(each for each in replicas if not is_full(each)) or tuple(replicas)
                route = routes.setdefault(ready, router(ready, rng))
            return route()

        return choose

    return make


@dataclass(frozen=True)
class Setup:
    """Replicas of a model, and what is sent to them.

    Attributes:
        profile: What batches cost.
        contender: The policy of each replica.
        replicas: How many.
        load: As a share of what all could serve with full batches.
        slower: By what factor the first replica is slower than the others.
    """

    profile: Profile
    contender: Contender
    replicas: int
    load: float
    slower: float = 1.0

    def run(self, router: Router | None, seed: int, requests: int) -> Outcome:
        """What became of the requests; without a router there is one queue."""
        loop, profile = VirtualLoop(), self.profile
        moments = poisson(self.load * profile.capacity(self.replicas), requests, seed)
        if router is None:
            services = [Simulation(self.contender, Service(profile), self.replicas, loop)]
            route: Route = lambda: services[0]  # noqa: E731
        else:
            kinds = [Service(profile, slowdowns=[Slowdown(0.0, self.slower)])]
            kinds += [Service(profile)] * (self.replicas - 1)
            services = [Simulation(self.contender, kind, loop=loop) for kind in kinds]
            route = router(services, random.Random(seed))
        clients = OpenLoop(loop, profile.goal, moments)

        def send(request: Request) -> float | None:
            return route().send(request)

        clients.send = send
        clients.start()
        loop.run()
        sizes = [size for each in services for size in each.sizes]
        outcome = Outcome.of(clients.requests, sizes, sum(each.busy for each in services))
        return outcome.after(requests // 10)

    def rows(
        self, routers: dict[str, Router | None], seeds: Sequence[int], requests: int
    ) -> list[tuple[str, ...]]:
        """A row of figures for each way to choose, means over the seeds."""
        return [
            (name, *_figures([self.run(router, seed, requests) for seed in seeds]))
            for name, router in routers.items()
        ]


def print_all(seeds: str, repetitions: int | None, requests: int | None) -> None:
    """Tables of all cases, with seeds for tuning or for reporting."""
    first = FIRST_SEED[seeds]
    some = range(first, first + (repetitions or _REPETITIONS))
    routers: dict[str, Router | None] = {CENTRAL: None, **ROUTERS}
    kinds = [*((GPU, policy) for policy in POLICIES), (TIGHT, ADAPTIVE)]
    for replicas, (profile, policy), load in product((1, 2, 4, 10), kinds, LOADS):
        few = {CENTRAL: None} if replicas == 1 else routers
        _print(Setup(profile, policy, replicas, load), few, some, requests)
    for load in (0.8, 0.95):
        for contender in (TAKE_ALL, ADAPTIVE):
            _print(Setup(GPU, contender, 100, load), routers, some[:1], requests or 50_000)
    for load in (0.5, 0.9):
        _print(Setup(CPU, ADAPTIVE, 4, load), routers, some, requests)
    for name in ("random", "round robin", "least requests"):
        both = {name: ROUTERS[name], f"{name}, ready": passing_over_full(ROUTERS[name], GPU.goal)}
        for load in (0.6, 0.8):
            _print(Setup(GPU, ADAPTIVE, 4, load, slower=_SLOWER), both, some, requests)


def _print(
    setup: Setup, routers: dict[str, Router | None], seeds: Sequence[int], requests: int | None
) -> None:
    number = requests or min(_MOST_REQUESTS, _REQUESTS_EACH * setup.replicas)
    slow = f", one {setup.slower:g} times slower" if setup.slower > 1 else ""
    title = (
        f"{setup.profile.name}, {setup.contender.name}, {setup.replicas} replicas{slow}, "
        f"load {setup.load}"
    )
    headings = ("requests go to", "batch", "goodput %", "p50 ms", "p99 ms", "refused %")
    print_table(title, headings, setup.rows(routers, seeds, number))


def _figures(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    return (
        f"{np.mean([one.batch_size for one in outcomes]):.1f}",
        f"{100 * np.mean([one.goodput for one in outcomes]):.1f}",
        f"{1000 * np.mean([one.latency_at(50) for one in outcomes]):.1f}",
        f"{1000 * np.mean([one.latency_p99 for one in outcomes]):.1f}",
        f"{100 * np.mean([one.turned_away for one in outcomes]):.1f}",
    )


def _in_flight(replica: Simulation) -> int:
    return replica.in_flight
