"""The points of a sweep: the cross product of the values of all settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from marserve.tools.bench.measurement import Point

#: The policy that has a latency goal.
WITH_GOAL = "adaptive"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The values to try for each attribute of `Point`; no values leave a setting unchanged."""

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
        """Return all points; settings that are slow to change vary slowest."""
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
            _without_unused_goal(replace(load, **dict(zip(settings, values, strict=True))))
            for values in combined
            for load in loads
        )
        return list(dict.fromkeys(points))


def _without_unused_goal(point: Point) -> Point:
    """Remove the latency goal from points with a policy that does not use it."""
    if point.batch_policy in (None, WITH_GOAL):
        return point
    return replace(point, max_latency_ms=None)
