"""The time line of the last runs: when each node was ready, dispatched and done."""

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class NodeTimes:
    """The times of a node, on the monotonic clock."""

    node: str
    queued: float  # when its input was complete
    attempts: int = 0
    started: float | None = None  # when it was sent to a worker, in the last attempt
    ended: float | None = None
    is_final: bool = False  # no attempt may follow, because a stateful worker has received it
    outcome: str = "cancelled"

    def document(self, start: float) -> dict[str, Any]:
        """Return a JSON object; times in ms since the start of the run."""
        return {
            "node": self.node,
            "queuedMs": _ms(self.queued - start),
            "startedMs": None if self.started is None else _ms(self.started - start),
            "endedMs": None if self.ended is None else _ms(self.ended - start),
            "attempts": self.attempts,
            "outcome": self.outcome,
        }


@dataclass(slots=True)
class RunTimes:
    """One run; its nodes are in the order in which they were ready."""

    id: str
    started: float
    ended: float = 0.0
    outcome: str = "cancelled"
    nodes: list[NodeTimes] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)  # seconds since the epoch

    def document(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "id": self.id,
            "startedAt": round(self.started_at * 1000),
            "tookMs": _ms(self.ended - self.started),
            "outcome": self.outcome,
            "nodes": [node.document(self.started) for node in self.nodes],
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
