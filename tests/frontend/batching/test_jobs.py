import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Group, Job, JobQueue
from marserve.frontend.batching.streams import Stream
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


def test_the_first_piece_is_the_answer_and_the_last_ends_it(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.push(Prediction(b"a", headers={"k": "v"}))
    job.push(Prediction(b"b"))
    assert job.is_open
    job.resolve(Prediction(b"c"))
    stream = job.future.result()
    assert isinstance(stream, Stream)
    assert stream.first.headers == {"k": "v"}
    with contextlib.closing(stream):
        assert job.is_open  # until it is read


def test_a_job_whose_reader_left_is_not_open(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.push(Prediction(b"a"))
    assert job.stream is not None
    job.stream.close()
    assert not job.is_open
    job.fail(WorkerDied())


def test_pieces_for_a_client_that_left_go_nowhere(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.future.cancel()
    job.push(Prediction(b"a"))
    assert job.stream is None


def test_jobs_of_different_groups_never_share_a_batch(loop: Any, fakes: ModuleType) -> None:
    queue = JobQueue(9)
    predict, explain, describe = Group
    groups = [predict, predict, explain, explain, describe, describe, predict]
    jobs = [Job(fakes.make_input(), 0.0, loop.create_future(), group) for group in groups]
    for job in jobs:
        queue.append(job)
    taken = []
    while queue:
        assert queue.first_group is groups[len(jobs) - len(queue)]
        taken.append(queue.pop(9))
    assert taken == [jobs[:2], jobs[2:4], jobs[4:5], jobs[5:6], jobs[6:]]


def test_the_line_can_be_cleared(make_job: Callable[..., Job]) -> None:
    queue = JobQueue(9)
    jobs = [make_job() for _ in range(3)]
    for job in jobs:
        queue.append(job)
    assert queue.clear() == jobs
    assert len(queue) == 0
