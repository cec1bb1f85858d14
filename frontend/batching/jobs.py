"""One request's unit of work, and the bounded line it stands in.

A job is answered exactly once: `Job.resolve` and `Job.fail` do nothing after the first of them, nor
after the client has left (the door that awaits the future is then cancelled, and the future with
it).
"""

import asyncio
import contextlib
from collections import deque

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.errors import ServeError


class Job:
    """One request on its way through the server.

    Args:
        input: What the client sent.
        arrived: Moment of arrival, seconds on the monotonic clock.
        future: Where the door waits for the prediction.
    """

    __slots__ = ("arrived", "dispatched", "future", "input")

    def __init__(self, input_: Input, arrived: float, future: asyncio.Future[Prediction]) -> None:
        self.input = input_
        self.arrived = arrived
        self.future = future
        #: Moment it left for a worker; None while it is queued.
        self.dispatched: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether somebody still waits for an answer."""
        return not self.future.done()

    def resolve(self, prediction: Prediction) -> None:
        """Answer with a prediction."""
        if not self.future.done():
            self.future.set_result(prediction)

    def fail(self, error: ServeError) -> None:
        """Answer with a failure."""
        if not self.future.done():
            self.future.set_exception(error)


class JobQueue:
    """The line of one model version: first in, first out, bounded.

    Args:
        capacity: Jobs that may wait. Those in a worker do not count.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_full(self) -> bool:
        """Whether the next job would have no seat."""
        return len(self._jobs) >= self.capacity

    @property
    def oldest_arrival(self) -> float:
        """When the first in line arrived; only for a queue that is not empty."""
        return self._jobs[0].arrived

    def append(self, job: Job) -> None:
        """Add a job at the end. The caller has looked at `is_full`."""
        self._jobs.append(job)

    def discard(self, job: Job) -> None:
        """Take a job out of the line, wherever it stands; nothing if it has left already."""
        if job.dispatched is None:
            with contextlib.suppress(ValueError):
                self._jobs.remove(job)

    def pop(self, count: int) -> list[Job]:
        """Take up to ``count`` jobs from the front, leaving out those nobody waits for."""
        popped: list[Job] = []
        jobs = self._jobs
        while jobs and len(popped) < count:
            job = jobs.popleft()
            if job.is_open:
                popped.append(job)
        return popped
