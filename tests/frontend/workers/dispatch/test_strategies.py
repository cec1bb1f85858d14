import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.backend.framing import encode
from marserve.backend.protocol import Load, Piece, Predict, Prediction, Reply
from marserve.frontend.batching.jobs import Group, Job, Stream, StreamBroken
from marserve.frontend.errors import PredictionFailed
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.workers.dispatch.asynchronous import Async
from marserve.frontend.workers.dispatch.batched import Batched
from marserve.frontend.workers.dispatch.continuous_batching import ContinuousBatching
from marserve.frontend.workers.dispatch.outstanding import OutstandingBatches

MORE = {"ts_stream_next": "true"}
DIED = "Worker died. Its process was killed by SIGSEGV."


def piece(*bodies: bytes) -> Piece:
    return Piece([Prediction(body) for body in bodies], [*range(len(bodies))])


def last(*bodies: bytes) -> Reply:
    return Reply(predictions=[Prediction(body) for body in bodies])


def step(**by_id: bool) -> Callable[[Predict], Reply]:
    """A step in which each request answers its id, and goes on or not."""

    def answer(batch: Predict) -> Reply:
        return Reply(
            predictions=[
                Prediction(input_.id.encode(), headers=MORE if by_id.get(input_.id) else {})
                for input_ in batch.inputs
            ]
        )

    return answer


async def answer_of(job: Job) -> bytes:
    """All of an answer; a bang at the end of one that was broken off."""
    answer = await job.future
    if isinstance(answer, Prediction):
        return bytes(answer.body)
    pieces = b""
    try:
        async for piece in answer.pieces():
            pieces += piece
    except StreamBroken:
        pieces += b"!"
    finally:
        answer.close()
    return pieces


def batched(*args: Any, **kwargs: Any) -> Batched:
    return Batched(*args, timeout=60.0, **kwargs)


def three_outstanding(*args: Any, **kwargs: Any) -> OutstandingBatches:
    return OutstandingBatches(*args, timeout=60.0, limit=3, **kwargs)


continuous = partial(ContinuousBatching, timeout=60.0)


async def outcomes(put: Any, *ids: str) -> list[str]:
    """What becomes of these requests, behind one that keeps the worker busy till all are there.

    That is their answer, which is their id; or the message of their error, and a bang.
    """
    jobs = [put(id_) for id_ in ("busy", *ids)]
    busy, *ends = await asyncio.gather(*[job.future for job in jobs], return_exceptions=True)
    assert busy.body == b"busy"
    return [
        f"{end}!" if isinstance(end, BaseException) else bytes(end.body).decode() for end in ends
    ]


def picky(*bad: str, fits: int = 1000) -> Callable[[Predict], Reply]:
    """A handler that raises for some requests, and needs too much memory for so many rows."""

    def answer(batch: Predict) -> Reply:
        ids = [input_.id for input_ in batch.inputs]
        if max(batch.run_as, len(ids)) > fits:
            return Reply(507, "Out of resources")
        if set(bad) & set(ids):
            return Reply(503, "bad: " + ",".join(ids))
        return Reply(predictions=[Prediction(id_.encode()) for id_ in ids])

    return answer


def test_pieces_reach_their_requests_and_the_next_batch_waits_for_the_last(run, served):
    replies = [piece(b"a0", b"b0"), piece(b"a1", b"b1"), last(b"a2", b"b2")]

    async def scenario():
        async with served(batched, predict=[fakes.echo, replies, fakes.echo]) as put:
            jobs = [put(id_) for id_ in "xabc"]
            assert [await answer_of(job) for job in jobs] == [b"x", b"a0a1a2", b"b0b1b2", b"c"]
            assert put.batches == [[b"x"], [b"a", b"b"], [b"c"]]

    run(scenario())


def test_a_piece_may_be_of_some_of_the_batch_only(run, served):
    of_b = Piece([Prediction(b"b0")], [1])

    async def scenario():
        async with served(batched, predict=[fakes.echo, [of_b, last(b"a", b"b")]]) as put:
            jobs = [put(id_) for id_ in "xab"]
            assert [await answer_of(job) for job in jobs] == [b"x", b"a", b"b0b"]

    run(scenario())


@pytest.mark.parametrize("places", [[1], [-1], [0, 0]])
def test_pieces_that_fit_no_request_lose_the_worker(places, run, served):
    wrong = Piece([Prediction(b"")], places)

    async def scenario():
        async with served(batched, predict=[[wrong, last(b"a")]]) as put:
            job = put("a")
            with pytest.raises(Exception, match="Worker died"):
                await job.future
            assert len(put.workers) == 2

    run(scenario())


def test_a_failure_behind_the_first_piece_breaks_the_answer_off(run, served):
    async def scenario():
        replies = [piece(b"a0"), Reply(503, "Prediction failed")]
        async with served(batched, predict=[replies, fakes.echo]) as put:
            assert await answer_of(put("a")) == b"a0!"
            assert await answer_of(put("b")) == b"b"

    run(scenario())


def test_an_intermediate_failure_ends_the_answers_not_the_worker(run, served):
    async def scenario():
        replies = [Piece(code=500, message="out of tokens"), last(b"late")]
        async with served(batched, predict=[replies, fakes.echo]) as put:
            job = put("a")
            with pytest.raises(Exception, match="out of tokens"):
                await job.future
            assert await answer_of(put("b")) == b"b"

    run(scenario())


def test_silence_after_a_piece_counts_from_the_piece(run, loop, served):
    async def scenario():
        async with served(batched, predict=[[piece(b"a0")]], seconds=50.0) as put:
            began = loop.time()
            assert await answer_of(put("a")) == b"a0!"
            assert loop.time() - began == pytest.approx(110.0, abs=1.0)

    run(scenario())


def test_steps_go_on_and_others_join_between_them(run, served):
    steps = [step(a=True), step(a=True), step(b=True), step()]

    async def scenario():
        async with served(continuous, predict=steps, seconds=1.0) as put:
            first = put("a")
            await asyncio.sleep(1.5)
            others = [put("b"), put("c")]
            answers = await asyncio.gather(*map(answer_of, [first, *others]))
            assert answers == [b"aaa", b"bb", b"c"]
            assert put.batches == [[b"a"], [b""], [b"", b"b"], [b"", b"c"]]

    run(scenario())


def test_a_question_about_the_model_waits_for_the_steps_to_end(run, served):
    async def scenario():
        async with served(continuous, predict=[step(a=True), step()], seconds=1.0) as put:
            jobs = [put("a"), put("alone", Group.DESCRIBE), put("b")]
            assert await asyncio.gather(*map(answer_of, jobs)) == [b"aa", b"alone", b"b"]
            assert put.batches == [[b"a"], [b""], [b"alone"], [b"b"]]

    run(scenario())


def test_who_has_left_is_left_out_of_the_next_step(run, served):
    async def scenario():
        async with served(continuous, predict=[step(a=True)], seconds=1.0) as put:
            job = put("a")
            stream = await job.future
            assert isinstance(stream, Stream)
            stream.close()
            await asyncio.sleep(1.5)
            assert await answer_of(put("b")) == b"b"
            assert put.batches == [[b"a"], [b""], [b"b"]]

    run(scenario())


@pytest.mark.parametrize("failure", [Reply(507, "Out of resources"), "die"])
def test_a_step_that_fails_fails_all_in_it(failure, run, served):
    async def scenario():
        async with served(continuous, predict=[step(a=True), failure, step()]) as put:
            assert await answer_of(put("a")) == b"a!"
            assert await answer_of(put("b")) == b"b"

    run(scenario())


def test_the_request_that_a_failed_step_is_about_begins_alone_the_next_time(run, served):
    def handler(batch):
        ids = [input_.id for input_ in batch.inputs]
        if "x" in ids and len(ids) > 1:
            return Reply(503, "bad", suspect=ids.index("x"), raised_at="handler.py:3")
        return step(x=True)(batch) if "x" not in answered else step()(batch)

    answered = []

    async def scenario():
        async with served(continuous, size=3, predict=[handler]) as put:
            assert await outcomes(put, *"axb") == ["bad!", "bad!", "bad!"]
            answered.append("x")
            del put.batches[:]
            assert await outcomes(put, *"axb") == ["a", "x", "b"]
            assert sorted(put.batches[1:], key=len) == [[b"x"], [b"a", b"b"]]
            del put.batches[:]
            assert await outcomes(put, *"axb") == ["bad!", "bad!", "bad!"]

    run(scenario())


def test_steps_finish_before_the_worker_ends_and_nobody_joins_any_more(run, served):
    async def scenario():
        async with served(continuous, predict=[step(a=True), step()], seconds=1.0) as put:
            job = put("a")
            stopping = asyncio.ensure_future(put.stop(10.0))
            await asyncio.sleep(0.5)
            late = put("b")
            assert await answer_of(job) == b"aa"
            await stopping
            assert late.is_open
            assert put.batches == [[b"a"], [b""]]

    run(scenario())


def test_async_requests_do_not_wait_for_each_other(run, served):
    async def scenario():
        way = partial(Async, timeout=None)
        async with served(way, size=4, seconds=1000.0) as put:
            jobs = [put(id_) for id_ in "abc"]
            await asyncio.sleep(1)
            assert all(job.dispatched is not None for job in jobs)
            assert [await answer_of(job) for job in jobs] == [b"a", b"b", b"c"]
            assert put.batches == [[b"a"], [b"b"], [b"c"]]

    run(scenario())


def test_an_async_worker_is_hung_when_it_is_silent_not_when_one_takes_long(run, loop, served):
    async def scenario():
        way = partial(Async, timeout=60.0)
        async with served(way, seconds=50.0, predict=[fakes.echo, fakes.echo, "hang"]) as put:
            began = loop.time()
            jobs = [put(id_) for id_ in "abc"]
            assert [await answer_of(job) for job in jobs[:2]] == [b"a", b"b"]
            with pytest.raises(Exception, match="Worker died"):
                await jobs[2].future
            assert loop.time() - began == pytest.approx(160.0, abs=1.0)

    run(scenario())


def test_no_more_async_requests_are_under_way_than_the_limit(run, loop, served, monkeypatch):
    monkeypatch.setattr(fakes, "FakeWorker", beside())

    async def scenario():
        async with served(partial(Async, timeout=None, limit=2), size=1) as put:
            began = loop.time()
            jobs = [put(id_) for id_ in "abcde"]
            await asyncio.sleep(1.0)
            assert [job.dispatched is not None for job in jobs] == [True, True, False, False, False]
            assert [await answer_of(job) for job in jobs] == [b"a", b"b", b"c", b"d", b"e"]
            assert loop.time() - began == pytest.approx(9.0)

    run(scenario())


# -- a failure is one request's alone --------------------------------------------------------------


@pytest.mark.parametrize("bad", range(32))
def test_a_bad_request_fails_alone_among_31_good_ones_at_every_place(bad, run, served):
    ids = [str(place) for place in range(32)]

    async def scenario():
        async with served(batched, size=32, predict=[picky(str(bad))]) as put:
            ends = await outcomes(put, *ids)
            assert ends.pop(bad) == f"bad: {bad}!"
            assert ends == [id_ for id_ in ids if id_ != str(bad)]
            assert len(put.batches) <= 1 + 1 + 10
            assert put.counted("marserve_isolated_batches_total") == 1

    run(scenario())


def test_the_runs_of_a_split_are_recorded_and_only_those_that_succeed_teach(run, served):
    async def scenario():
        async with served(batched, size=4, predict=[picky("d")], seconds=0.1) as put:
            assert await outcomes(put, *"abcd") == ["a", "b", "c", "bad: d!"]
            await asyncio.sleep(0)
            records = list(put.batcher.history.documents())
            assert [
                (record["size"], record["reason"], record["succeeded"]) for record in records
            ] == [
                (1, "window", True),
                (4, "full", False),
                (2, "isolation", True),
                (1, "isolation", True),
                (1, "isolation", False),
            ]
            assert [record["tookMs"] for record in records] == pytest.approx([100.0] * 5)
            points = put.batcher.costs.points
            assert [(point.size, point.batches) for point in points] == [(1, 2), (2, 1)]

    run(scenario())


def test_explanations_are_isolated_too(run, served):
    async def scenario():
        async with served(batched, size=2, predict=[picky("a")]) as put:
            put("busy")
            bad, good = put("a", Group.EXPLAIN), put("b", Group.EXPLAIN)
            assert await answer_of(good) == b"b"
            with pytest.raises(PredictionFailed, match="bad: a"):
                await bad.future

    run(scenario())


def test_a_handler_whose_batches_never_work_serves_its_requests_one_by_one(run, served):
    def answer(batch):
        if len(batch.inputs) > 1:
            return Reply(503, "number of batch response mismatched")
        return picky()(batch)

    async def scenario():
        async with served(batched, size=4, predict=[answer]) as put:
            assert await outcomes(put, *"abcd") == [*"abcd"]

    run(scenario())


def test_isolation_can_be_switched_off_and_on_while_it_serves(run, served):
    async def scenario():
        off = {"isolates": False}
        async with served(batched, size=3, batching=off, predict=[picky("a")]) as put:
            assert await outcomes(put, *"abc") == ["bad: a,b,c!"] * 3
            assert put.counted("marserve_isolated_batches_total") == 0
            put.batcher.reconfigure(replace(put.batcher.batching, isolates=True))
            assert await outcomes(put, *"abc") == ["bad: a!", "b", "c"]

    run(scenario())


def test_good_requests_are_answered_however_long_others_are_bad(run, served):
    async def scenario():
        predict = [
            lambda batch: picky(*[item.id for item in batch.inputs if "x" in item.id])(batch)
        ]
        async with served(batched, size=4, predict=predict, seconds=0.5) as put:
            for number in range(100):
                ids = [f"{number}{name}" for name in ("x", "a", "b", "c")]
                assert (await outcomes(put, *ids))[1:] == ids[1:]

    run(scenario())


def test_what_failed_runs_alone_when_it_is_sent_again_and_its_mates_in_full_batches(run, served):
    async def scenario():
        async with served(batched, size=3, predict=[picky("x")]) as put:
            assert await outcomes(put, *"axb") == ["a", "bad: x!", "b"]
            del put.batches[:]
            assert await outcomes(put, *"axbc") == ["a", "bad: x!", "b", "c"]
            assert sorted(put.batches[1:], key=len) == [[b"x"], [b"a", b"b", b"c"]]
            reasons = [record["reason"] for record in put.batcher.history.documents()]
            assert sorted(reasons[-2:]) == ["full", "suspected"]

    run(scenario())


def test_what_failed_and_succeeds_alone_shares_batches_again(run, served):
    async def scenario():
        predict = [picky(), *[picky("x")] * 4, picky()]
        async with served(batched, size=2, predict=predict) as put:
            assert await outcomes(put, *"ax") == ["a", "bad: x!"]
            assert await outcomes(put, *"ax") == ["a", "x"]
            del put.batches[:]
            assert await outcomes(put, *"ax") == ["a", "x"]
            assert put.batches == [[b"busy"], [b"a", b"x"]]

    run(scenario())


def test_a_suspected_request_does_not_wait_for_the_window_of_others(run, loop, served):
    async def scenario():
        async with served(batched, size=2, batching={"delay": 60.0}, predict=[picky("x")]) as put:
            with pytest.raises(PredictionFailed):
                await asyncio.gather(put("a").future, put("x").future)
            put("b")
            await asyncio.sleep(1.0)
            began = loop.time()
            with pytest.raises(PredictionFailed):
                await put("x").future
            assert loop.time() - began < 1.0

    run(scenario())


def test_batches_become_smaller_while_many_requests_fail_and_full_again_afterwards(run, served):
    async def scenario():
        predict = [
            lambda batch: picky(*[item.id for item in batch.inputs if "x" in item.id])(batch)
        ]
        async with served(batched, size=8, predict=predict, seconds=0.1) as put:
            for number in range(30):
                ids = [f"{number}-{place}{'x' * (place % 2)}" for place in range(8)]
                ends = await outcomes(put, *ids)
                assert ends[::2] == ids[::2]
            assert put.batcher.size == 1
            assert "of the requests fail" in put.batcher.learning.why
            for number in range(30):
                await outcomes(put, *[f"{number}-{place}" for place in range(8)])
            assert (put.batcher.size, put.batcher.learning.why) == (8, "")

    run(scenario())


def test_a_model_that_fails_for_all_is_tried_in_full_batches_and_hardly_split(run, served):
    async def scenario():
        async with served(batched, size=8, predict=[Reply(503, "broken")]) as put:
            for number in range(20):
                await asyncio.gather(
                    *[put(f"{number}-{place}").future for place in range(8)],
                    return_exceptions=True,
                )
            assert put.batcher.size == 8
            assert [len(batch) for batch in put.batches[-4:]] == [1, 7, 1, 1]

    run(scenario())


def test_an_answer_that_has_begun_is_broken_off_and_its_mates_run_again(run, served):
    async def scenario():
        of_a = Piece([Prediction(b"a0")], [0])
        replies = [picky(), [of_a, Reply(503, "no")], picky()]
        async with served(batched, size=3, predict=replies) as put:
            put("busy")
            a, b, c = (put(id_) for id_ in "abc")
            assert [await answer_of(job) for job in (a, b, c)] == [b"a0!", b"b", b"c"]
            assert put.batches == [[b"busy"], [b"a", b"b", b"c"], [b"b"], [b"c"]]

    run(scenario())


def test_a_batch_is_split_before_a_worker_that_is_to_end_does(run, served):
    async def scenario():
        predict = [picky("a")]
        async with served(batched, size=2, predict=predict, seconds=1.0) as put:
            ending = asyncio.ensure_future(outcomes(put, "a", "b"))
            await asyncio.sleep(1.5)
            await put.stop(10.0)
            assert await ending == ["bad: a!", "b"]

    run(scenario())


def test_a_worker_that_ends_in_the_midst_of_a_split_answers_all_it_had(run, served):
    async def scenario():
        predict = [picky("a")]
        async with served(batched, size=4, predict=predict, seconds=1.0) as put:
            ending = asyncio.ensure_future(outcomes(put, *"abcd"))
            await asyncio.sleep(2.5)
            await put.stop(0)
            assert await ending == ["Worker died. It was stopped.!"] * 4

    run(scenario())


@pytest.mark.parametrize("mistaken", ["batch_done", "failed_batches"])
def test_requests_were_never_answered_where_the_server_failed_over_their_reply(
    mistaken, run, served, monkeypatch
):
    calls = []

    def fail_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError

    # The instance's own attribute is stored by a setter that does nothing.
    failing = property(lambda _: SimpleNamespace(update=fail_once), lambda *_: None)
    substitute = fail_once if mistaken == "batch_done" else failing
    monkeypatch.setattr(ModelMetrics, mistaken, substitute, raising=False)

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with served(batched, size=4, predict=[picky("a")]) as put:
            async with asyncio.timeout(100):
                ends = await outcomes(put, *"abcd")
            assert ends[1:] == ["b", "c", "d"]
            assert ends[0].startswith("bad: a")

    run(scenario())


def test_a_worker_that_dies_in_the_midst_of_a_split_takes_nobody_along(run, served):
    def deadly(batch):
        ids = [input_.id for input_ in batch.inputs]
        return "die" if "b" in ids and len(ids) < 4 else picky("a")(batch)

    async def scenario():
        async with served(batched, size=4, predict=[deadly]) as put:
            assert await outcomes(put, *"abcd") == ["bad: a!", f"{DIED}!", "c", "d"]
            assert len(put.workers) == 3

    run(scenario())


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolates", [True, False])
def test_a_batch_too_large_for_memory_is_run_in_halves_and_the_bound_remembered(
    isolates, run, served
):
    ids = [f"{place}" for place in range(16)]

    async def scenario():
        handler, batching = picky(fits=4), {"isolates": isolates}
        async with served(batched, size=16, batching=batching, predict=[handler]) as put:
            assert await outcomes(put, *ids) == ids
            assert put.batcher.size == 4
            before = len(put.batches)
            assert await outcomes(put, *ids) == ids
            assert [len(batch) for batch in put.batches[before:]] == [1, 4, 4, 4, 4]
            reasons = {record["reason"] for record in put.batcher.history.documents()}
            assert reasons == {"full", "window", "out_of_memory"}

    run(scenario())


def test_a_model_that_raises_above_a_size_was_split_for_ever(run, served):
    def small(batch):
        return Reply(503, "too many") if len(batch.inputs) > 2 else picky()(batch)

    async def scenario():
        async with served(batched, size=4, predict=[small]) as put:
            for _ in range(8):
                assert put.batcher.size == 4
                assert await outcomes(put, *"abcd") == [*"abcd"]
            assert put.batcher.size == 2
            assert put.batcher.learning.why == "batches of 4 fail, and their requests alone do not"
            before = len(put.batches)
            assert await outcomes(put, *"abcd") == [*"abcd"]
            assert [len(batch) for batch in put.batches[before:]] == [1, 2, 2]

    run(scenario())


def test_a_size_that_fails_now_and_then_stays(run, served):
    counts = itertools.count()

    def moody(batch):
        fails = len(batch.inputs) > 2 and next(counts) % 3
        return Reply(503, "not now") if fails else picky()(batch)

    async def scenario():
        async with served(batched, size=4, predict=[moody]) as put:
            for _ in range(30):
                assert await outcomes(put, *"abcd") == [*"abcd"]
            assert put.batcher.size == 4

    run(scenario())


def test_a_request_too_large_for_memory_fails_alone_and_the_size_stays(run, served):
    def handler(batch):
        if "c" in [input_.id for input_ in batch.inputs]:
            return Reply(507, "Out of resources")
        return picky()(batch)

    async def scenario():
        async with served(batched, size=4, predict=[handler]) as put:
            assert await outcomes(put, *"abcd") == ["a", "b", "Out of resources!", "d"]
            assert put.batcher.size == 4

    run(scenario())


def test_parts_run_as_sizes_that_the_model_was_compiled_for(run, served):
    rows = []

    def handler(batch):
        rows.append((len(batch.inputs), batch.run_as))
        return picky("g")(batch)

    async def scenario():
        batching = {"compiled_sizes": (2, 4, 8)}
        async with served(batched, size=8, batching=batching, predict=[handler]) as put:
            ends = await outcomes(put, *"abcdefg")
            assert ends == [*"abcdef", "bad: g!"]
            assert rows[0] == (1, 2)
            assert rows[1] in [(7, 8), (4, 4)]
            assert all(run_as in (2, 4, 8) and run_as >= size for size, run_as in rows)

    run(scenario())


# -- death -----------------------------------------------------------------------------------------


def test_of_a_step_those_that_have_no_piece_yet_are_run_again_when_the_worker_dies(run, served):
    async def scenario():
        lives = [{"predict": [step(a=True), "die"], "seconds": 1.0}, {"predict": [step()]}]
        async with served(continuous, lives=lives) as put:
            a = put("a")
            await asyncio.sleep(0.5)
            b = put("b")
            assert await asyncio.gather(answer_of(a), answer_of(b)) == [b"a!", b"b"]
            assert put.workers[1].batches == [[b"b"]]

    run(scenario())


def test_a_larger_batch_size_holds_from_the_next_step_on(run, served):
    async def scenario():
        steps = [step(a=True), step(a=True), step()]
        async with served(continuous, size=1, predict=steps, seconds=1.0) as put:
            jobs = [put(id_) for id_ in "ab"]
            await asyncio.sleep(1.5)
            put.batcher.reconfigure(replace(put.batcher.batching, size=2))
            assert await asyncio.gather(*map(answer_of, jobs)) == [b"aaa", b"b"]
            assert put.batches == [[b"a"], [b""], [b"", b"b"]]

    run(scenario())


def beside(deadly: str = "", seconds: float = 3.0, fuse: float = 0.2) -> Any:
    """Workers of coroutines that take so long; one request ends its worker after its fuse."""

    class Worker(fakes.FakeWorker):
        async def _obey(self, message: Any, writer: Any) -> None:
            if isinstance(message, Load):
                await super()._obey(message, writer)
                return
            self.batches.append([message.inputs[0].id])
            self.tasks.append(asyncio.ensure_future(self._answer_one(message, writer)))

        async def _answer_one(self, message: Any, writer: Any) -> None:
            (input_,) = message.inputs
            await asyncio.sleep(fuse if input_.id == deadly else seconds)
            if input_.id == deadly:
                self.crash()
                return
            reply = Reply(predictions=[Prediction(input_.id.encode())], number=message.number)
            writer.write(b"".join(encode(reply)))

        def crash(self) -> None:
            super().crash()
            for task in self.tasks:
                if task is not asyncio.current_task():
                    task.cancel()

        async def stop(self, grace: float, *close: Any) -> int:
            self.crash()
            return int(await super().stop(grace, *close))

        @property
        def tasks(self) -> list[Any]:
            return self.__dict__.setdefault("_tasks", [])

    return Worker


@pytest.mark.parametrize("deadly", ["a", "b", "c"])
def test_a_coroutine_that_kills_its_worker_dies_of_the_second_and_takes_nobody_along(
    deadly, run, served, monkeypatch
):
    monkeypatch.setattr(fakes, "FakeWorker", beside(deadly))

    async def scenario():
        async with served(partial(Async, timeout=None), size=4) as put:
            ends = await outcomes(put, "a", "b", "c")
            assert ends == [f"{DIED}!" if id_ == deadly else id_ for id_ in "abc"]
            assert len(put.workers) == 3

    run(scenario())


def test_a_coroutine_that_is_known_to_kill_does_it_once_and_costs_the_others_a_repetition(
    run, served, monkeypatch
):
    monkeypatch.setattr(fakes, "FakeWorker", beside("x", seconds=0.5))

    async def scenario():
        async with served(partial(Async, timeout=None), size=4) as put:
            assert (await outcomes(put, "x", "a"))[1:] == ["a"]
            workers = len(put.workers)
            others = [put(id_) for id_ in "bcd"]
            deadly = put("x")
            late = put("e")
            for job, id_ in zip([*others, late], [b"b", b"c", b"d", b"e"], strict=True):
                assert await answer_of(job) == id_
            assert str(deadly.future.exception()) == DIED
            assert len(put.workers) == workers + 1
            # They were known not to be the cause: they ran together again, not one after another.
            assert len(put.workers[-1].batches) >= 4

    run(scenario())


@pytest.mark.parametrize("deadly", ["a", "b", "c"])
def test_a_coroutine_that_kills_late_does_it_no_more_than_three_times(
    deadly, run, served, monkeypatch
):
    monkeypatch.setattr(fakes, "FakeWorker", beside(deadly, 9.0, fuse=2.5))

    async def scenario():
        async with served(partial(Async, timeout=None), size=4) as put:
            jobs = {id_: put(id_) for id_ in ("x", "a", "b", "c", "d")}
            futures = [job.future for job in jobs.values()]
            await asyncio.gather(*futures, return_exceptions=True)
            assert str(jobs[deadly].future.exception()) == DIED
            assert len(put.workers) <= 1 + 3

    run(scenario())


@pytest.mark.parametrize(("seconds", "answered_after"), [(2.0, 3 * 1.0 + 2.0), (0.3, 4 * 0.3)])
def test_coroutines_whose_worker_died_go_one_after_the_other_at_first_and_then_together(
    seconds, answered_after, run, loop, served, monkeypatch
):
    monkeypatch.setattr(fakes, "FakeWorker", beside(seconds=seconds))

    async def scenario():
        async with served(partial(Async, timeout=None), size=4) as put:
            ending = asyncio.ensure_future(outcomes(put, "a", "b", "c"))
            await asyncio.sleep(0.1)
            put.workers[0].crash()
            began = loop.time()
            assert await ending == ["a", "b", "c"]
            assert loop.time() - began == pytest.approx(answered_after)

    run(scenario())


FATES = st.lists(
    st.sampled_from(["good", "good", "good", "raises", "kills", "hangs", "leaves"]),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("way", [batched, three_outstanding])
@settings(max_examples=60)
@given(FATES, st.integers(1, 8), st.booleans(), st.booleans(), st.integers(1, 8))
def test_everybody_is_answered_once_and_only_the_guilty_fail(
    way, served, fates, size, isolates, retries, fits
):
    fate_of = {str(place): fate for place, fate in enumerate(fates)}
    deaths = Counter()
    answered = []

    def handler(batch):
        ids = [input_.id for input_ in batch.inputs]
        here = {fate_of.get(id_) for id_ in ids}
        if "kills" in here or "hangs" in here:
            deaths.update(ids)
            return "die" if "kills" in here else "hang"
        reply = picky(*[id_ for id_ in ids if fate_of.get(id_) == "raises"], fits=fits)(batch)
        if reply.code == 200:
            answered.extend(ids)
        return reply

    async def scenario():
        batching = {"isolates": isolates, "retries": retries}
        async with served(way, size=size, batching=batching, predict=[handler]) as put:
            busy = put("busy")
            jobs = {id_: put(id_) for id_ in fate_of}
            await busy.future
            for id_, fate in fate_of.items():
                if fate == "leaves":
                    jobs[id_].cancel()
            staying = [job.future for id_, job in jobs.items() if fate_of[id_] != "leaves"]
            await asyncio.gather(*staying, return_exceptions=True)
            assert len(answered) == len(set(answered))
            assert all(count <= 2 for count in deaths.values())
            for id_, job in jobs.items():
                if isolates and retries and fate_of[id_] == "good" and fates.count("raises") <= 1:
                    assert bytes(job.future.result().body) == id_.encode()
                if fate_of[id_] in ("raises", "kills", "hangs"):
                    assert job.future.exception() is not None

    loop = fakes.VirtualLoop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", loop.time)
        try:
            loop.run(scenario())
        finally:
            loop.close()
