"""Jobs and queues of them."""

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Job, Priority


@pytest.fixture
def make_job(fakes: ModuleType, loop: Any) -> Callable[..., Job]:
    def make(
        arrived: float = 0.0,
        group: Group = Group.PREDICT,
        *,
        deadline: float = math.inf,
        priority: Priority = Priority.NORMAL,
        order: float | None = None,
    ) -> Job:
        future = loop.create_future()
        job = fakes.AwaitedJob(
            fakes.make_input(), arrived, future, group, deadline=deadline, priority=priority
        )
        job.order = arrived if order is None else order
        return job

    return make


@pytest.fixture
def make_queue(make_job: Callable[..., Job]) -> Callable[..., JobQueue]:
    """A queue of jobs with these deadlines, or of a number without; all arrived at one moment."""

    def make(jobs: int | Sequence[float], arrived: float = 0.0) -> JobQueue:
        deadlines = [math.inf] * jobs if isinstance(jobs, int) else jobs
        queue = JobQueue(max(1, len(deadlines)))
        for deadline in deadlines:
            queue.append(make_job(arrived, deadline=deadline))
        return queue

    return make
