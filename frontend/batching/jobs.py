"""One request's unit of work, and the bounded line it stands in.

A job is answered exactly once: `Job.resolve` and `Job.fail` do nothing after the first of them, nor
after the client has left (the door that awaits the future is then cancelled, and the future with
it). An answer in pieces counts as one: its first piece resolves the future with a `Stream`.
"""

import asyncio
import contextlib
from collections import deque
from enum import Enum

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.streams import Stream
from marserve.frontend.errors import ServeError

Answered = Prediction | Stream


class Group(Enum):
    """Who may travel together: handlers look at the first request to see what a batch wants."""

    PREDICT = "predict"
    EXPLAIN = "explain"
    #: A question about the model; each travels alone, and waits for no company.
    DESCRIBE = "describe"


class Job:
    """One request on its way through the server.

    Args:
        input: What the client sent.
        arrived: Moment of arrival, seconds on the monotonic clock.
        future: Where the door waits for the prediction.
        group: Jobs share a batch with others of their group only.
    """

    __slots__ = ("arrived", "dispatched", "future", "group", "input", "stream")

    def __init__(
        self,
        input_: Input,
        arrived: float,
        future: asyncio.Future[Answered],
        group: Group = Group.PREDICT,
    ) -> None:
        self.input = input_
        self.arrived = arrived
        self.future = future
        self.group = group
        #: Moment it left for a worker; None while it is queued.
        self.dispatched: float | None = None
        #: Where its pieces go; None until there is one.
        self.stream: Stream | None = None

    @property
    def is_open(self) -> bool:
        """Whether somebody still waits for an answer, or for more of it."""
        if self.stream is not None:
            return self.stream.is_open
        return not self.future.done()

    def resolve(self, prediction: Prediction) -> None:
        """Answer with a prediction, or with the last piece of one."""
        if self.stream is not None:
            self.stream.push(prediction.body)
            self.stream.end()
        elif not self.future.done():
            self.future.set_result(prediction)

    def push(self, piece: Prediction) -> None:
        """Answer with a piece of a prediction; others follow."""
        if self.stream is not None:
            self.stream.push(piece.body)
        elif not self.future.done():
            self.stream = Stream(piece)
            self.future.set_result(self.stream)

    def fail(self, error: ServeError) -> None:
        """Answer with a failure; an answer that has begun is broken off."""
        if self.stream is not None:
            self.stream.break_off(error.message)
        elif not self.future.done():
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

    @property
    def first_group(self) -> Group:
        """The group of the first in line; only for a queue that is not empty."""
        return self._jobs[0].group

    def append(self, job: Job) -> None:
        """Add a job at the end. The caller has looked at `is_full`."""
        self._jobs.append(job)

    def discard(self, job: Job) -> None:
        """Take a job out of the line, wherever it stands; nothing if it has left already."""
        if job.dispatched is None:
            with contextlib.suppress(ValueError):
                self._jobs.remove(job)

    def pop(self, count: int) -> list[Job]:
        """Take up to ``count`` jobs of one group from the front; nobody waits for those left out.

        A job of another group ends what is taken before it.
        """
        popped: list[Job] = []
        jobs = self._jobs
        while jobs and len(popped) < count:
            group = jobs[0].group
            if popped and (group is not popped[0].group or group is Group.DESCRIBE):
                break
            job = jobs.popleft()
            if job.is_open:
                popped.append(job)
        return popped

    def clear(self) -> list[Job]:
        """Take all jobs out of the line."""
        jobs = list(self._jobs)
        self._jobs.clear()
        return jobs
