"""When a batch closes: pure decisions, no clock but the moment that is passed in."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with the queue now.

    Attributes:
        take: How many jobs leave now; 0 means wait.
        until: Moment to look again, if `full` jobs are not there sooner (seconds, same clock).
        full: Number of jobs that would make waiting pointless.
    """

    take: int
    until: float = 0.0
    full: int = 0


class BatchPolicy(Protocol):
    """Decides when a batch closes."""

    def plan(self, now: float, queued: int, oldest_arrival: float) -> Plan:
        """Decide for a queue of at least one job, for a worker that is free now.

        Args:
            now: The moment, seconds on a monotonic clock.
            queued: Jobs in line, at least 1.
            oldest_arrival: When the first of them arrived, on the same clock.
        """


@dataclass(frozen=True, slots=True)
class FixedWindow:
    """TorchServe's window: a batch leaves when it is full or its time is over.

    The window is counted from the arrival of the oldest job. (TorchServe counted from the moment a
    worker began to collect, so that jobs which had waited behind a busy worker waited again.) A
    delay of 0 takes what is there, up to the batch size; TorchServe's loop then stopped at two.

    Args:
        batch_size: Most jobs in a batch, at least 1.
        delay: Longest time the oldest job waits for company, seconds.
    """

    batch_size: int
    delay: float

    def plan(self, now: float, queued: int, oldest_arrival: float) -> Plan:
        """See `BatchPolicy.plan`."""
        if queued >= self.batch_size:
            return Plan(self.batch_size)
        closes = oldest_arrival + self.delay
        if now >= closes:
            return Plan(queued)
        return Plan(0, closes, self.batch_size)
