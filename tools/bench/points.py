"""The points of a sweep: everything that is to be tried, as the cross product of what was named."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from marserve.tools.bench.measurement import Point

#: The policy that has a latency goal.
WITH_GOAL = "adaptive"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is to be tried; an empty one leaves the setting as it was.

    Attributes:
        clients: Of closed loops.
        rates: Of open loops.
        batch_sizes: Of the model.
        max_batch_delays_ms: Of the model.
        batch_policies: Of the model; marserve's only.
        max_latencies_ms: Of the model; marserve's only.
        workers: Of the model.
        precisions: Of the model.
        torch_threads: Of each worker; marserve's only.
        outstanding_batches: Of each worker; marserve's only.
    """

    clients: Sequence[int] = ()
    rates: Sequence[float] = ()
    batch_sizes: Sequence[int] = ()
    max_batch_delays_ms: Sequence[int] = ()
    batch_policies: Sequence[str] = ()
    max_latencies_ms: Sequence[int] = ()
    workers: Sequence[int] = ()
    precisions: Sequence[str] = ()
    torch_threads: Sequence[int] = ()
    outstanding_batches: Sequence[int] = ()

    def points(self) -> list[Point]:
        """Every point, what costs most to change changing least often."""
        settings: dict[str, Sequence[Any]] = {
            "precision": self.precisions,
            "torch_threads": self.torch_threads,
            "outstanding_batches": self.outstanding_batches,
            "workers": self.workers,
            "batch_size": self.batch_sizes,
            "batch_policy": self.batch_policies,
            "max_latency_ms": self.max_latencies_ms,
            "max_batch_delay_ms": self.max_batch_delays_ms,
        }
        loads = [Point(clients=client) for client in self.clients]
        loads += [Point(rate=rate) for rate in self.rates]
        combined = product(*(values or (None,) for values in settings.values()))
        points = (
            _with_sense(replace(load, **dict(zip(settings, values, strict=True))))
            for values in combined
            for load in loads
        )
        return list(dict.fromkeys(points))


def _with_sense(point: Point) -> Point:
    """Only one policy has a latency goal; with the others there is nothing to combine it with."""
    if point.batch_policy in (None, WITH_GOAL):
        return point
    return replace(point, max_latency_ms=None)
