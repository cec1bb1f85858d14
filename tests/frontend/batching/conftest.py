"""Jobs and queues of them."""

import math

import fakes
import pytest

from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Priority


@pytest.fixture
def make_job(loop):
    def make(
        arrived=0.0, group=Group.PREDICT, *, deadline=math.inf, priority=Priority.NORMAL, order=None
    ):
        future = loop.create_future()
        job = fakes.AwaitedJob(
            fakes.make_input(), arrived, future, group, deadline=deadline, priority=priority
        )
        job.order = arrived if order is None else order
        return job

    return make


@pytest.fixture
def make_queue(make_job):
    """A queue of jobs with these deadlines, or of a number without; all arrived at one moment."""

    def make(jobs, arrived=0.0):
        deadlines = [math.inf] * jobs if isinstance(jobs, int) else jobs
        queue = JobQueue(max(1, len(deadlines)))
        for deadline in deadlines:
            queue.append(make_job(arrived, deadline=deadline))
        return queue

    return make
