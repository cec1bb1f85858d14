"""The workers of a batcher: those that wait for a batch, and what the others run."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.policies import WorkerPoolState


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

    def remove(self, runner: BatchRunner, batches: Iterable[Batch] = ()) -> None:
        """Remove a worker, which may be lent, and the batches that it has. Safe to call twice."""
        for busy in (runner, *batches):
            self.busy.pop(busy, None)
        if runner in self.waiting:
            self.waiting.remove(runner)
            self.idle -= 1

    def replace(self, batch: Batch, part: Batch) -> None:
        """Note that the worker of a batch is now busy with a part of it."""
        if self.busy.pop(batch, None) is not None:
            self.busy[part] = part.closed + part.predicted, len(part)
