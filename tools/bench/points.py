"""The points of a sweep: the cross product of the values of all settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from marserve.frontend.configuration.model_schema import BY_KEY
from marserve.frontend.configuration.setting import Setting
from marserve.tools.bench.measurement import Point

#: The policy that has a latency goal.
WITH_GOAL = "adaptive"
#: The server's settings that points have, by attribute of `Point`.
SERVER_ROWS: Mapping[str, Setting] = {
    "performance_hint": BY_KEY["performanceHint"],
    "batch_size": BY_KEY["batchSize"],
    "batch_policy": BY_KEY["batchPolicy"],
    "max_batch_delay_ms": BY_KEY["maxBatchDelay"],
    "max_latency_ms": BY_KEY["maxLatencyMs"],
    "torch_threads": BY_KEY["torchThreads"],
    "outstanding_batches": BY_KEY["outstandingBatches"],
}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The values to try for each attribute of `Point`; no values leave a setting unchanged."""

    clients: Sequence[int] = ()
    rates: Sequence[float] = ()
    performance_hints: Sequence[str] = ()
    batch_sizes: Sequence[int | str] = ()
    max_batch_delays_ms: Sequence[int] = ()
    batch_policies: Sequence[str] = ()
    max_latencies_ms: Sequence[int] = ()
    workers: Sequence[int] = ()
    precisions: Sequence[str] = ()
    torch_threads: Sequence[int | str] = ()
    outstanding_batches: Sequence[int] = ()

    def points(self) -> list[Point]:
        """Return all points; settings that are slow to change vary slowest."""
        settings: dict[str, Sequence[Any]] = {
            "precision": self.precisions,
            "torch_threads": self.torch_threads,
            "outstanding_batches": self.outstanding_batches,
            "workers": self.workers,
            "performance_hint": self.performance_hints,
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
