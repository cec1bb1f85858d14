import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from marserve.backend.protocol import Load, Predict, Prediction, Reply
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.jobs import Group, Job, JobQueue
from marserve.frontend.batching.policies import FixedWindow
from marserve.frontend.batching.streams import Stream, StreamBroken
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.workers.process import WorkerSpec
from marserve.frontend.workers.serving import Concurrent, InSteps, OneAtATime
from marserve.frontend.workers.supervisor import WorkerSupervisor, WorkerTimeouts

MORE = {"ts_stream_next": "true"}


def piece(*bodies: bytes) -> Reply:
    return Reply(
        predictions=[Prediction(body) for body in bodies], places=[*range(len(bodies))], more=True
    )


def last(*bodies: bytes) -> Reply:
    return Reply(predictions=[Prediction(body) for body in bodies])


def step(**by_id: bool) -> Callable[[Predict], Reply]:
    """A step in which each request answers its id, and goes on or not."""

    def answer(batch: Predict) -> Reply:
        return Reply(
            predictions=[
                Prediction(one.id.encode(), headers=MORE if by_id.get(one.id) else {})
                for one in batch.inputs
            ]
        )

    return answer


@pytest.fixture
def served(fakes: ModuleType) -> Callable[..., Any]:
    """A queue that one fake worker serves, in some way."""

    @asynccontextmanager
    async def make(way: Any, size: int = 2, **life: Any) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        queue = JobQueue(100)
        batcher = Batcher(queue, FixedWindow(size, 0.0), loop, loop.time)
        launcher = fakes.FakeLauncher(fakes.Life(**life))
        supervisor = WorkerSupervisor(
            worker_id=9000,
            spec=WorkerSpec("W", {}, (), "/m", 0),
            load=Load("m", "/m", "h", size, None, True, True, 1000, "1"),
            timeouts=WorkerTimeouts(20.0, 300.0),
            make_serving=way,
            batcher=batcher,
            launcher=launcher,
            metrics=Metrics("host").for_model("m", "1.0"),
        )
        supervisor.start(lambda: None)
        await supervisor.first_outcome()

        def put(id_: str, group: Group = Group.PREDICT) -> Job:
            input_ = fakes.make_input(id_.encode(), id_=id_)
            job = Job(input_, loop.time(), loop.create_future(), group)
            batcher.put(job)
            return job

        put.batches = launcher.workers[0].batches  # type: ignore[attr-defined]
        put.stop = supervisor.stop  # type: ignore[attr-defined]
        try:
            yield put
        finally:
            await supervisor.stop(0)
            await fakes.settled()

    return make


async def whole(job: Job) -> bytes:
    """All of an answer; a bang at the end of one that was broken off."""
    answer = await job.future
    if isinstance(answer, Prediction):
        return bytes(answer.body)
    pieces = b""
    try:
        async for one in answer.pieces():
            pieces += one
    except StreamBroken:
        pieces += b"!"
    finally:
        answer.close()
    return pieces


one_at_a_time = partial(OneAtATime, timeout=60.0)
in_steps = partial(InSteps, timeout=60.0, size=2)


def test_pieces_reach_their_requests_and_the_next_batch_waits_for_the_last(
    run: Callable[..., Any], fakes: ModuleType, served: Callable[..., Any]
) -> None:
    replies = [piece(b"a0", b"b0"), piece(b"a1", b"b1"), last(b"a2", b"b2")]

    async def scenario() -> None:
        async with served(one_at_a_time, predict=[fakes.echo, replies, fakes.echo]) as put:
            jobs = [put(id_) for id_ in "xabc"]
            assert [await whole(job) for job in jobs] == [b"x", b"a0a1a2", b"b0b1b2", b"c"]
            assert put.batches == [[b"x"], [b"a", b"b"], [b"c"]]

    run(scenario())


def test_a_piece_may_be_of_some_of_the_batch_only(
    run: Callable[..., Any], fakes: ModuleType, served: Callable[..., Any]
) -> None:
    of_b = Reply(predictions=[Prediction(b"b0")], places=[1], more=True)

    async def scenario() -> None:
        async with served(one_at_a_time, predict=[fakes.echo, [of_b, last(b"a", b"b")]]) as put:
            jobs = [put(id_) for id_ in "xab"]
            assert [await whole(job) for job in jobs] == [b"x", b"a", b"b0b"]

    run(scenario())


@pytest.mark.parametrize("places", [[1], [-1], [0, 0]])
def test_pieces_that_fit_no_request_lose_the_worker(
    places: list[int], run: Callable[..., Any], served: Callable[..., Any]
) -> None:
    wrong = Reply(predictions=[Prediction(b"")], places=places, more=True)

    async def scenario() -> None:
        async with served(one_at_a_time, predict=[[wrong, last(b"a")]]) as put:
            job = put("a")
            with pytest.raises(Exception, match="Worker died"):
                await job.future

    run(scenario())


def test_a_failure_behind_the_first_piece_breaks_the_answer_off(
    run: Callable[..., Any], fakes: ModuleType, served: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        replies = [piece(b"a0"), Reply(503, "Prediction failed")]
        async with served(one_at_a_time, predict=[replies, fakes.echo]) as put:
            assert await whole(put("a")) == b"a0!"
            assert await whole(put("b")) == b"b"

    run(scenario())


def test_an_intermediate_failure_ends_the_answers_not_the_worker(
    run: Callable[..., Any], fakes: ModuleType, served: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        replies = [Reply(500, "out of tokens", more=True), last(b"late")]
        async with served(one_at_a_time, predict=[replies, fakes.echo]) as put:
            job = put("a")
            with pytest.raises(Exception, match="out of tokens"):
                await job.future
            assert await whole(put("b")) == b"b"

    run(scenario())


def test_silence_after_a_piece_counts_from_the_piece(
    run: Callable[..., Any], loop: Any, served: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with served(one_at_a_time, predict=[[piece(b"a0")]], seconds=50.0) as put:
            began = loop.time()
            assert await whole(put("a")) == b"a0!"
            assert loop.time() - began == pytest.approx(110.0, abs=1.0)

    run(scenario())


def test_steps_go_on_and_others_join_between_them(
    run: Callable[..., Any], served: Callable[..., Any]
) -> None:
    steps = [step(a=True), step(a=True), step(b=True), step()]

    async def scenario() -> None:
        async with served(in_steps, predict=steps, seconds=1.0) as put:
            first = put("a")
            await asyncio.sleep(1.5)
            others = [put("b"), put("c")]
            answers = await asyncio.gather(*map(whole, [first, *others]))
            assert answers == [b"aaa", b"bb", b"c"]
            assert put.batches == [[b"a"], [b""], [b"", b"b"], [b"", b"c"]]

    run(scenario())


def test_a_question_about_the_model_waits_for_the_steps_to_end(
    run: Callable[..., Any], served: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with served(in_steps, predict=[step(a=True), step()], seconds=1.0) as put:
            jobs = [put("a"), put("alone", Group.DESCRIBE), put("b")]
            assert await asyncio.gather(*map(whole, jobs)) == [b"aa", b"alone", b"b"]
            assert put.batches == [[b"a"], [b""], [b"alone"], [b"b"]]

    run(scenario())


def test_who_has_left_is_left_out_of_the_next_step(
    run: Callable[..., Any], served: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with served(in_steps, predict=[step(a=True)], seconds=1.0) as put:
            job = put("a")
            stream = await job.future
            assert isinstance(stream, Stream)
            stream.close()
            await asyncio.sleep(1.5)
            assert await whole(put("b")) == b"b"
            assert put.batches == [[b"a"], [b""], [b"b"]]

    run(scenario())


@pytest.mark.parametrize("failure", [Reply(507, "Out of resources"), "die"])
def test_a_step_that_fails_fails_all_in_it(
    failure: Any, run: Callable[..., Any], served: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with served(in_steps, predict=[step(a=True), failure, step()]) as put:
            assert await whole(put("a")) == b"a!"
            assert await whole(put("b")) == b"b"

    run(scenario())


def test_steps_finish_before_the_worker_ends_and_nobody_joins_any_more(
    run: Callable[..., Any], served: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with served(in_steps, predict=[step(a=True), step()], seconds=1.0) as put:
            job = put("a")
            stopping = asyncio.ensure_future(put.stop(10.0))
            await asyncio.sleep(0.5)
            late = put("b")
            assert await whole(job) == b"aa"
            await stopping
            assert late.is_open
            assert put.batches == [[b"a"], [b""]]

    run(scenario())


def test_concurrent_requests_do_not_wait_for_each_other(
    run: Callable[..., Any], fakes: ModuleType, served: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        way = partial(Concurrent, timeout=None)
        async with served(way, size=4, seconds=1000.0) as put:
            jobs = [put(id_) for id_ in "abc"]
            await asyncio.sleep(1)
            assert all(job.dispatched is not None for job in jobs)
            assert [await whole(job) for job in jobs] == [b"a", b"b", b"c"]
            assert put.batches == [[b"a"], [b"b"], [b"c"]]

    run(scenario())


def test_a_concurrent_worker_is_hung_when_it_is_silent_not_when_one_takes_long(
    run: Callable[..., Any], fakes: ModuleType, loop: Any, served: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        way = partial(Concurrent, timeout=60.0)
        async with served(way, seconds=50.0, predict=[fakes.echo, fakes.echo, "hang"]) as put:
            began = loop.time()
            jobs = [put(id_) for id_ in "abc"]
            assert [await whole(job) for job in jobs[:2]] == [b"a", b"b"]
            with pytest.raises(Exception, match="Worker died"):
                await jobs[2].future
            assert loop.time() - began == pytest.approx(160.0, abs=1.0)

    run(scenario())
