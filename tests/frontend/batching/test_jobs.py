from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Job, JobQueue
from marserve.frontend.errors import NoWorker, WorkerDied


@pytest.fixture
def make_job(fakes: ModuleType, loop: Any) -> Callable[..., Job]:
    return lambda arrived=0.0: Job(fakes.make_input(), arrived, loop.create_future())


def test_the_first_answer_counts(make_job: Callable[..., Job]) -> None:
    job = make_job()
    assert job.is_open
    job.resolve(Prediction(b"first"))
    job.resolve(Prediction(b"second"))
    job.fail(WorkerDied())
    assert not job.is_open
    assert job.future.result().body == b"first"


def test_the_first_failure_counts(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.fail(WorkerDied())
    job.fail(NoWorker("late"))
    job.resolve(Prediction(b"late"))
    assert isinstance(job.future.exception(), WorkerDied)


@pytest.mark.parametrize(
    "answer", [lambda job: job.resolve(Prediction(b"")), lambda job: job.fail(WorkerDied())]
)
def test_an_answer_for_a_client_that_left_goes_nowhere(
    make_job: Callable[..., Job], answer: Callable[[Job], None]
) -> None:
    job = make_job()
    job.future.cancel()
    assert not job.is_open
    answer(job)
    assert job.future.cancelled()


def test_the_queue_knows_its_seats_and_its_oldest(make_job: Callable[..., Job]) -> None:
    queue = JobQueue(2)
    assert not queue.is_full
    queue.append(make_job(3.0))
    queue.append(make_job(4.0))
    assert (queue.is_full, len(queue), queue.oldest_arrival) == (True, 2, 3.0)
    queue.pop(1)
    assert (queue.is_full, len(queue), queue.oldest_arrival) == (False, 1, 4.0)


def test_jobs_leave_in_order_and_those_nobody_waits_for_are_left_out(
    make_job: Callable[..., Job],
) -> None:
    queue = JobQueue(9)
    jobs = [make_job() for _ in range(6)]
    for job in jobs:
        queue.append(job)
    jobs[0].future.cancel()
    jobs[2].fail(NoWorker("expired"))
    jobs[2].future.exception()
    assert queue.pop(3) == [jobs[1], jobs[3], jobs[4]]
    assert queue.pop(3) == [jobs[5]]
    assert queue.pop(3) == []


def test_a_job_can_leave_the_line_wherever_it_stands(make_job: Callable[..., Job]) -> None:
    queue = JobQueue(9)
    jobs = [make_job() for _ in range(3)]
    for job in jobs:
        queue.append(job)
    queue.discard(jobs[1])
    queue.discard(jobs[1])
    queue.discard(make_job())
    assert queue.pop(9) == [jobs[0], jobs[2]]
