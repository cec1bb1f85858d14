"""Answers in pieces whose readers are slow: reports to workers of coroutines, and deadlines."""

import asyncio
from functools import partial

import fakes
import pytest

from marserve.backend.protocol import STREAM_WINDOW, Piece, Prediction
from marserve.frontend.batching.jobs import Stream, StreamBroken
from marserve.frontend.workers.dispatch.asynchronous import Async
from marserve.frontend.workers.dispatch.batched import Batched

QUARTER = STREAM_WINDOW // 4


def pieces(count: int, size: int) -> list[Piece]:
    """Pieces of an answer that has no end."""
    return [Piece([Prediction(bytes(size))], [0])] * count


async def read(stream: Stream, count: int) -> None:
    """Read pieces of an answer, and want the next."""
    async for _ in stream.pieces():
        count -= 1
        if count < 0:
            break


@pytest.mark.parametrize(
    ("size", "reported"),
    [
        pytest.param(QUARTER // 10, [], id="short"),
        pytest.param(QUARTER // 2 + 1, [QUARTER + 2] * 5, id="long"),
        pytest.param(2 * STREAM_WINDOW, [2 * STREAM_WINDOW] * 10, id="large pieces"),
    ],
)
def test_what_a_client_has_read_is_reported_if_it_is_much(size, reported, run, served):
    async def scenario():
        async with served(partial(Async, timeout=None), predict=[pieces(11, size)]) as put:
            stream = await put("a").future
            await fakes.drain_loop()
            assert put.workers[0].read == []  # nothing is read yet
            await read(stream, 10)
            await fakes.drain_loop()
            assert put.workers[0].read == reported
            stream.close()

    run(scenario())


@pytest.mark.parametrize("is_started", [True, False])
def test_what_nobody_reads_is_reported_so_that_no_handler_waits(is_started, run, served):
    async def scenario():
        replies = pieces(8, QUARTER)
        async with served(partial(Async, timeout=None), seconds=1.0, predict=[replies]) as put:
            job = put("a")
            if is_started:
                stream = await job.future
                await fakes.drain_loop()
                stream.close()
            else:
                await asyncio.sleep(0.5)
                job.cancel()
                await asyncio.sleep(1.0)
            await fakes.drain_loop()
            assert 8 * QUARTER - sum(put.workers[0].read) <= QUARTER

    run(scenario())


def test_other_workers_get_no_reports(run, served):
    async def scenario():
        replies = pieces(8, QUARTER)
        async with served(partial(Batched, timeout=None), predict=[replies]) as put:
            stream = await put("a").future
            await read(stream, 7)
            await fakes.drain_loop()
            assert put.workers[0].read == []
            stream.close()

    run(scenario())


def test_a_worker_that_waits_for_a_client_is_not_hung(run, loop, served):
    async def scenario():
        replies = pieces(3, STREAM_WINDOW // 2)
        async with served(partial(Async, timeout=60.0), predict=[replies]) as put:
            stream = await put("a").future
            await asyncio.sleep(300.0)
            assert (stream.is_open, len(put.workers)) == (True, 1)
            began = loop.time()
            with pytest.raises(StreamBroken, match="Worker died"):
                await read(stream, 4)
            stream.close()
            assert loop.time() - began == pytest.approx(60.0, abs=1.0)

    run(scenario())


def test_an_answer_that_does_not_continue_is_broken_off_while_others_are_answered(
    run, loop, served
):
    async def scenario():
        replies = [pieces(1, 1), *[fakes.echo] * 8]
        async with served(partial(Async, timeout=60.0), seconds=50.0, predict=replies) as put:
            stream = await put("a").future
            began, others = loop.time(), [put(id_) for id_ in "bcdefghi"]
            with pytest.raises(StreamBroken, match=r"nothing for responseTimeout \(60 s\)"):
                await read(stream, 2)
            stream.close()
            assert 60.0 <= loop.time() - began <= 121.0
            assert [(await job.future).body for job in others] == [*map(str.encode, "bcdefghi")]
            assert len(put.workers) == 1
            assert put.counted("marserve_failed_batches_total") == 1

    run(scenario())


def test_an_answer_whose_client_does_not_read_waits_while_others_are_answered(run, served):
    async def scenario():
        replies = [pieces(3, STREAM_WINDOW // 2), *[fakes.echo] * 8]
        async with served(partial(Async, timeout=60.0), seconds=50.0, predict=replies) as put:
            stream = await put("a").future
            for id_ in "bcdefghi":
                await put(id_).future
            assert stream.is_open
            stream.close()

    run(scenario())


def test_a_worker_that_has_all_of_its_window_is_hung_if_it_is_silent(run, loop, served):
    async def scenario():
        replies = pieces(2, STREAM_WINDOW // 2)
        async with served(partial(Async, timeout=60.0), predict=[replies]) as put:
            stream = await put("a").future
            await asyncio.sleep(50.0)
            assert stream.is_open
            await asyncio.sleep(20.0)
            assert not stream.is_open
            stream.close()

    run(scenario())
