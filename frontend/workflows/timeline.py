"""The time line of the last runs: when each node was ready, dispatched and done."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MAX_RUNS = 100


@dataclass(slots=True)
class NodeTimes:
    """The times of a node, on the monotonic clock.

    Attributes:
        queued: When its input was complete.
        started: When it was sent to a worker, in the last attempt.
        ended: When it ended; None while it runs.
        is_final: Whether no attempt may follow, because a stateful worker has received it.
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
    """One run; its nodes are in the order in which they were ready."""

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
        """Return the runs as JSON objects, oldest first; times in ms since the start of a run."""
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
