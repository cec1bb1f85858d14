"""The time line of runs: when each node was ready, sent to a worker and done, for the last runs."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MAX_RUNS = 100


@dataclass(slots=True)
class NodeTimes:
    """When a node's input was there (``queued``), when it was sent to a worker, and when it ended.

    Moments are those of the monotonic clock; where a node is tried again, ``started`` is of the
    last try. ``ended`` is None while it runs. ``is_final``: it cannot be tried again, because the
    worker of a stateful model had it.
    """

    node: str
    queued: float
    attempts: int = 0
    started: float | None = None
    ended: float | None = None
    is_final: bool = False
    outcome: str = "cancelled"


@dataclass(slots=True)
class RunTimes:
    """One run; its nodes in the order in which they were ready."""

    id: str
    started: float
    ended: float = 0.0
    outcome: str = "cancelled"
    nodes: list[NodeTimes] = field(default_factory=list)


class Timeline:
    """The last runs of a workflow."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._runs: deque[RunTimes] = deque(maxlen=_MAX_RUNS)

    def add(self, run: RunTimes) -> None:
        """Record a run that has ended."""
        self._runs.append(run)

    def as_documents(self) -> list[dict[str, Any]]:
        """The runs as JSON objects, the newest last; times in milliseconds since a run's start."""
        epoch = self._wall_clock() - self._clock()
        return [
            {
                "id": run.id,
                "startedAt": round((epoch + run.started) * 1000),
                "tookMs": _ms(run.ended - run.started),
                "outcome": run.outcome,
                "nodes": [_node_document(times, run.started) for times in run.nodes],
            }
            for run in self._runs
        ]


def _node_document(times: NodeTimes, start: float) -> dict[str, Any]:
    return {
        "node": times.node,
        "queuedMs": _ms(times.queued - start),
        "startedMs": None if times.started is None else _ms(times.started - start),
        "endedMs": None if times.ended is None else _ms(times.ended - start),
        "attempts": times.attempts,
        "outcome": times.outcome,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
