"""Inputs of different lengths, padded to the longest of their batch: batches by length, or not.

    python benchmarks/batching_sim --groups lengths [--seeds report]

Lengths are lognormal. A batch costs what its profile says, but each item as much as the longest,
relative to the mean length. The load is a share of what full batches could serve without any
padding, so that in the order of their arrival far less of it can be carried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from clients import OpenLoop, Request
from contenders import ADAPTIVE, COLD, TAKE_ALL, TAKE_LIVING, TORCHSERVE
from engine import Contender, Simulation
from groups import FIRST_SEED
from length_bound import curve
from outcome import Outcome
from profiles import Profile, Service
from report import print_table
from workloads import poisson

from marserve.backend.protocol import Input, Part
from marserve.frontend.batching.batches import Batch
from marserve.frontend.configuration.model_schema import BY_LENGTH, BY_LENGTH_IF_WORTH, UNSORTED

_MEAN_BYTES = 400
_BODY = memoryview(bytes(1 << 20))
LOADS = (0.3, 0.6, 0.9, 1.3)
#: Of this group, among the others.
NAME = "lengths"
_REPETITIONS, _REQUESTS = 3, 6000


@dataclass(frozen=True)
class Lengths:
    """A model whose cost depends on lengths, and what is sent to it.

    Attributes:
        name: How tables call it.
        profile: What batches cost whose longest item has the mean length.
        sigma: Of the logarithm of lengths.
        square: The share of an item's cost that grows with the square of the length.
        matter: Whether lengths change costs at all.
    """

    name: str
    profile: Profile
    sigma: float
    square: float = 0.0
    matter: bool = True

    def lengths(self, count: int, seed: int) -> np.ndarray:
        """As shares of the mean."""
        rng = np.random.default_rng((seed, 7))
        return rng.lognormal(-(self.sigma**2) / 2, self.sigma, count)

    def seconds(self, size: int, longest: float) -> float:
        """What a batch takes."""
        if not self.matter:
            return self.profile.cost(size)
        relative = (1 - self.square) * longest + self.square * longest * longest
        return self.profile.beta + self.profile.alpha * size * relative


_ENCODER = Profile("encoder", 0.002, 0.008, 32, 0.250)
_SMALL = Profile("small encoder", 0.0005, 0.004, 32, 0.100)
MODELS = (
    Lengths("encoder, sigma 0.8", _ENCODER, 0.8),
    Lengths("encoder, sigma 1.2", _ENCODER, 1.2),
    Lengths("attention, sigma 0.8", _ENCODER, 0.8, square=0.3),
    Lengths("small encoder, sigma 0.5", _SMALL, 0.5),
    Lengths("all of one length", _ENCODER, 0.0),
    Lengths("lengths do not matter", _ENCODER, 0.8, matter=False),
)
# The share of the requests that are the longest.
_LONGEST = 0.1
# Of these, the shares for which a table shows what a schedule can reach.
_LEAST = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


class LengthSimulation(Simulation):
    """Requests with lengths, and workers that pad.

    Args:
        contender: The policy.
        model: What batches cost.
        lengths: Of the requests, in the order of their arrival.
        seed: Of the noise.
    """

    def __init__(
        self, contender: Contender, model: Lengths, lengths: np.ndarray, seed: int
    ) -> None:
        self._model = model
        self._lengths = iter(lengths.tolist())
        self._noise = np.random.default_rng((seed, 8))
        self.padded = self.needed = 0.0
        super().__init__(contender, Service(model.profile, seed=seed))

    def input_of(self, request: Request) -> Input:
        """See `Simulation.input_of`."""
        del request
        length = max(1, round(_MEAN_BYTES * next(self._lengths)))
        return Input("", {}, [Part("body", "", _BODY[:length])])

    def seconds_of(self, batch: Batch) -> float:
        """See `Simulation.seconds_of`."""
        lengths = [len(job.input.parts[0].body) / _MEAN_BYTES for job in batch.jobs]
        self.padded += max(lengths) * len(lengths)
        self.needed += sum(lengths)
        return self._model.seconds(batch.run_as, max(lengths)) * self._noise.lognormal(-0.005, 0.1)


def bucketed(contender: Contender, bucket_by: str, name: str) -> Contender:
    """The same with batches by length."""
    return replace(
        contender,
        name=name,
        batching=lambda profile: replace(contender.batching(profile), bucket_by=bucket_by),
    )


_IN_ORDER = bucketed(ADAPTIVE, UNSORTED, "adaptive, in order")
CONTENDERS = (
    TORCHSERVE,
    TAKE_ALL,
    TAKE_LIVING,
    bucketed(TAKE_ALL, BY_LENGTH, "take-all, by length"),
    _IN_ORDER,
    bucketed(ADAPTIVE, BY_LENGTH_IF_WORTH, "adaptive, auto"),
    bucketed(ADAPTIVE, BY_LENGTH, "adaptive, by length"),
    bucketed(COLD, BY_LENGTH, "adaptive, by length, cold"),
)


def run(
    contender: Contender, model: Lengths, load: float, requests: int, seed: int
) -> tuple[Outcome, float, float]:
    """What became of the requests, the share of padding, and how many long ones are in time."""
    lengths = model.lengths(requests, seed)
    simulation = LengthSimulation(contender, model, lengths, seed)
    moments = poisson(load * model.profile.capacity(), requests, seed)
    outcome = simulation.run(OpenLoop(simulation.loop, model.profile.goal, moments))
    longest = np.argsort(lengths, kind="stable")[-round(_LONGEST * requests) :]
    padding = 1 - simulation.needed / simulation.padded
    return outcome, padding, float(outcome.good[longest].mean())


def print_model(
    model: Lengths, loads: Sequence[float], requests: int, seeds: Sequence[int]
) -> None:
    """A table for each load."""
    for load in loads:
        rows = []
        for contender in CONTENDERS:
            runs = [run(contender, model, load, requests, seed) for seed in seeds]
            outcomes = [outcome for outcome, _, _ in runs]
            rows.append(
                (
                    contender.name,
                    f"{100 * np.mean([one.goodput for one in outcomes]):.1f}",
                    f"{100 * np.mean([longest for _, _, longest in runs]):.1f}",
                    f"{100 * np.mean([one.late for one in outcomes]):.1f}",
                    f"{100 * np.mean([one.turned_away for one in outcomes]):.1f}",
                    f"{1000 * np.mean([one.mean_latency for one in outcomes]):.0f}",
                    f"{1000 * np.mean([one.latency_p99 for one in outcomes]):.0f}",
                    f"{np.mean([one.batch_size for one in outcomes]):.1f}",
                    f"{100 * np.mean([padding for _, padding, _ in runs]):.0f}",
                )
            )
        headings = ("policy", "goodput %", "of the longest tenth", "late %", "refused %")
        more = ("mean ms", "p99 ms", "batch", "padding %")
        print_table(f"{model.name}, load {load}", (*headings, *more), rows)


def print_curve(model: Lengths, loads: Sequence[float]) -> None:
    """What the best schedule has in time, if it has a share of the longest tenth in time."""
    rows = []
    for load in loads:
        points = [f"{100 * goodput:.1f}" for goodput, _ in curve(model, load, _LEAST)]
        rows.append((str(load), *points, *("-" for _ in _LEAST[len(points) :])))
    headings = (f">= {100 * least:.0f} %" for least in _LEAST)
    title = f"{model.name}: goodput %, by the share of the longest tenth that is in time"
    print_table(title, ("load", *headings), rows)


def print_all(seeds: str, repetitions: int | None, requests: int | None) -> None:
    """Tables of all models, with seeds for tuning or for reporting."""
    first = FIRST_SEED[seeds]
    for model in MODELS:
        some = range(first, first + (repetitions or _REPETITIONS))
        print_model(model, LOADS, requests or _REQUESTS, some)
        if model.sigma and model.matter:
            print_curve(model, LOADS)
