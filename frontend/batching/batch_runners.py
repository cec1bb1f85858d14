"""The workers of a batcher: those that wait for a batch, and what the others run."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.policies import WorkerPoolState

_outstanding = attrgetter("outstanding")


class BatchRunner(Protocol):
    """A worker, as the batcher sees it."""

    @property
    def outstanding(self) -> int:
        """How many batches were sent to it and are not answered yet."""

    def run(self, batch: Batch) -> None:
        """Start a batch; returns at once and never raises."""


@dataclass
class BatchRunners(WorkerPoolState):
    """The state of the workers for policies, and those ``waiting``, the longest waiting first."""

    waiting: deque[BatchRunner] = field(default_factory=deque)

    def add(self, runner: BatchRunner) -> None:
        """Add a worker that waits for a batch."""
        self.waiting.append(runner)
        self.idle += 1

    def remove(self, runner: BatchRunner, batches: Iterable[Batch] = ()) -> None:
        """Remove a worker, which may be lent, and the batches that it has. Safe to call twice."""
        for busy in (runner, *batches):
            self.busy.pop(busy, None)
        if runner in self.waiting:
            self.waiting.remove(runner)
            self.idle -= 1

    def start(self, batch: Batch) -> None:
        """Run a batch in the worker with the fewest outstanding batches.

        Among equals it is the one that has waited longest.
        """
        waiting = self.waiting
        runner = waiting[0] if self.idle == 1 else min(waiting, key=_outstanding)
        waiting.remove(runner)
        self.idle -= 1
        self.busy[batch] = batch.closed + batch.predicted, len(batch)
        runner.run(batch)

    def replace(self, batch: Batch, part: Batch) -> None:
        """Note that the worker of a batch is now busy with a part of it."""
        if self.busy.pop(batch, None) is not None:
            self.busy[part] = part.closed + part.predicted, len(part)
