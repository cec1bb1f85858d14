import contextlib
from collections.abc import Callable

import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Job
from marserve.frontend.batching.streams import Stream
from marserve.frontend.errors import NoWorker, WorkerDied


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
    job.cancel()
    assert not job.is_open
    answer(job)
    assert job.future.cancelled()


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
    job.cancel()
    job.push(Prediction(b"a"))
    assert job.stream is None
