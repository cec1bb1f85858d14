import asyncio
import contextlib
from typing import Any

import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Stream, StreamBroken
from marserve.frontend.errors import NoWorker, WorkerDied


def test_the_first_answer_counts(make_job):
    job = make_job()
    assert job.is_open
    job.resolve(Prediction(b"first"))
    job.resolve(Prediction(b"second"))
    job.fail(WorkerDied())
    assert not job.is_open
    assert job.future.result().body == b"first"


def test_the_first_failure_counts(make_job):
    job = make_job()
    job.fail(WorkerDied())
    job.fail(NoWorker("late"))
    job.resolve(Prediction(b"late"))
    assert isinstance(job.future.exception(), WorkerDied)


@pytest.mark.parametrize(
    "answer", [lambda job: job.resolve(Prediction(b"")), lambda job: job.fail(WorkerDied())]
)
def test_an_answer_for_a_client_that_left_goes_nowhere(make_job, answer):
    job = make_job()
    job.cancel()
    assert not job.is_open
    answer(job)
    assert job.future.cancelled()


def test_the_first_piece_is_the_answer_and_the_last_ends_it(make_job):
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


def test_a_job_whose_reader_left_is_not_open(make_job):
    job = make_job()
    job.push(Prediction(b"a"))
    assert job.stream is not None
    job.stream.close()
    assert not job.is_open
    job.fail(WorkerDied())


def test_pieces_for_a_client_that_left_go_nowhere(make_job):
    job = make_job()
    job.cancel()
    job.push(Prediction(b"a"))
    assert not job.is_open
    assert job.future.cancelled()


@pytest.fixture
def stream():
    return Stream(Prediction(b"first"))


async def read(stream: Stream) -> list[Any]:
    pieces: list[Any] = []
    try:
        async for piece in stream.pieces():
            pieces.append(piece)  # noqa: PERF401 - what came before it broke counts
    except StreamBroken as error:
        pieces.append(str(error))
    finally:
        stream.close()
    return pieces


def test_pieces_come_in_order_and_end(run, stream):
    stream.push(b"second")
    stream.end()
    stream.push(b"too late")
    stream.break_off("too late")
    assert run(read(stream)) == [b"first", b"second"]


def test_a_reader_waits_for_the_next_piece(run, stream):
    async def scenario():
        reading = asyncio.ensure_future(read(stream))
        for piece in (b"second", b"third"):
            await asyncio.sleep(1)
            assert not reading.done()
            stream.push(piece)
        stream.end()
        assert await reading == [b"first", b"second", b"third"]

    run(scenario())


def test_what_came_before_it_broke_is_read(run, stream):
    stream.push(b"second")
    stream.break_off("Worker died.")
    assert not stream.is_open
    assert run(read(stream)) == [b"first", b"second", "Worker died."]


def test_a_reader_that_is_too_far_behind_loses_its_answer(run, stream):
    calls = []
    stream.on_behind = lambda: calls.append(stream.is_open)
    stream.max_waiting_bytes = 10
    stream.push(b"12345")
    assert (stream.is_open, calls) == (True, [])
    stream.push(b"6")
    assert calls == [False]
    assert run(read(stream)) == ["the client is too slow"]


def test_any_amount_may_wait_where_there_is_no_limit(run, stream):
    pieces = [bytes([number]) * 1000 for number in range(100)]
    for piece in pieces:
        stream.push(piece)
    stream.end()
    assert run(read(stream)) == [b"first", *pieces]


@pytest.mark.parametrize(
    ("end", "told"),
    [(Stream.end, (True, "")), (lambda stream: stream.break_off("no"), (False, "no"))],
)
def test_the_end_is_reported_once_with_whether_it_was_complete(end, told, run, stream):
    calls = []
    stream.on_close = lambda *call: calls.append(call)
    end(stream)
    run(read(stream))
    stream.close()
    assert calls == [told]


def test_a_reader_that_leaves_early_leaves_an_incomplete_answer(stream):
    calls = []
    stream.on_close = lambda *call: calls.append(call)
    stream.close()
    stream.push(b"into the void")
    assert (stream.is_open, calls) == (False, [(False, "")])


def test_what_waits_for_the_reader_is_told_until_nothing_does(run, stream):
    told = []
    stream.on_waiting = told.append
    stream.push(b"123")
    stream.fall_behind("too slow")
    assert told == [3, -8]
    assert run(read(stream)) == ["too slow"]
    stream.close()
    assert (sum(told), stream.waiting_bytes) == (-5, 0)


class Reads:
    """The bytes that a stream reports as read; it accepts a report of more than ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.counts: list[int] = []

    def __call__(self, count: int) -> bool:
        if count > self.step:
            self.counts.append(count)
        return count > self.step


def test_a_piece_is_read_when_the_reader_wants_the_next(run):
    reads = Reads(0)
    stream = Stream(Prediction(b"first"), reads)
    stream.push(b"second")

    async def scenario():
        pieces = aiter(stream.pieces())
        assert (await anext(pieces), reads.counts) == (b"first", [])
        assert (await anext(pieces), reads.counts) == (b"second", [5])
        stream.end()
        assert [piece async for piece in pieces] == []
        assert (reads.counts, stream.unread_bytes) == ([5, 6], 0)
        stream.close()

    run(scenario())


def test_few_bytes_are_reported_with_later_ones(run):
    reads = Reads(9)
    stream = Stream(Prediction(b"12345"), reads)
    for _ in range(4):
        stream.push(b"12345")
    stream.end()
    run(read(stream))
    assert (reads.counts, stream.unread_bytes) == ([10, 10], 5)


@pytest.mark.parametrize(
    "drop", [Stream.close, lambda stream: (stream.fall_behind("slow"), stream.close())]
)
def test_what_nothing_reads_any_more_counts_as_read(drop, run):
    reads = Reads(0)
    stream = Stream(Prediction(b"first"), reads)
    stream.push(b"second")

    async def scenario():
        pieces = stream.pieces()
        await anext(pieces)
        drop(stream)
        stream.push(b"third")
        assert (sum(reads.counts), stream.unread_bytes) == (16, 0)
        await pieces.aclose()

    run(scenario())


@pytest.mark.parametrize("end", [lambda job: job.cancel(), lambda job: job.fail(WorkerDied())])
def test_pieces_for_a_client_that_has_its_answer_count_as_read(end, make_job):
    reads = Reads(0)
    job = make_job()
    end(job)
    for _ in range(2):
        job.push(Prediction(b"12345"), reads)
    assert sum(reads.counts) == 10
    job.future.cancelled() or job.future.exception()
