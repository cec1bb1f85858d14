"""Calls of models by handlers: refusals, inherited options, and released resources."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import fakes
import pytest

from marserve.backend.protocol import Call, Part, Piece, Prediction, Reply
from marserve.frontend.batching.jobs import Job, Priority
from marserve.frontend.errors import (
    CyclicCall,
    ModelNotFound,
    PayloadTooLarge,
    RequestExpired,
    ServeError,
    ServerBusy,
    ServerStopping,
    TooMuchInFlight,
)
from marserve.frontend.serving import model_calls
from marserve.frontend.serving.model_calls import ModelCalls
from marserve.frontend.serving.registry import ModelRegistry


def call(model: str = "m", body: bytes = b"x", **members: Any) -> Call:
    parts = [Part("body", "", body)]
    return Call(
        **{
            "number": 1,
            "batch": 1,
            "version": "",
            "timeout": None,
            "headers": {},
            "model": model,
            "parts": parts,
            **members,
        }
    )


class Calls:
    """`ModelCalls` over one model ``m``, and what is said to have called it."""

    def __init__(self, model: Any, **limits: int) -> None:
        registry = ModelRegistry()
        if model is not None:
            registry.add(model)
        limits = {"max_request_bytes": 100, "max_answer_bytes": 100, "max_bytes": 150, **limits}
        self.of = ModelCalls(registry, **limits)
        self.reads = True
        self.unread: list[Callable[[], object]] = []

    def job(self, **members: Any) -> Job:
        return Job(fakes.make_input(id_="caller"), 0.0, lambda _answer: None, **members)

    def begin(self, caller: Job | None = None, name: str = "a", **members: Any) -> Any:
        """Call the model; returns the future of the answer, and the ticket."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def on_answer(given: Any, on_read: Callable[[], object]) -> None:
            answer.set_result(given)
            self.unread.append(on_read)
            if self.reads:
                on_read()

        ticket = self.of.by(name, "1.0")(caller or self.job(), call(**members), on_answer)
        return answer, ticket

    @property
    def leftovers(self) -> tuple[Any, ...]:
        return self.of._callers, self.of._waiting, self.of._usage.bytes


NOTHING: tuple[Any, ...] = ({}, {}, 0)


def test_a_call_is_answered_by_the_model_and_leaves_nothing(run, serve_model):
    async def scenario():
        async with serve_model() as model:
            calls = Calls(model)
            answer, ticket = calls.begin(body=b"hello")
            assert calls.leftovers != NOTHING
            assert (await answer).body == b"hello"
            ticket.cancel()  # too late, and safe
            assert calls.leftovers == NOTHING
            assert model.pending == 0

    run(scenario())


def test_time_priority_and_id_are_inherited(run, serve_model):
    seen = []

    async def scenario():
        async with serve_model() as model:
            calls = Calls(model)
            put = model.batcher.put
            model.batcher.put = lambda job, **_: (seen.append(job), put(job))
            now = time.monotonic()
            hurried = calls.job(deadline=now + 5, priority=Priority.HIGH)
            streaming = calls.job(deadline=now - 5)
            streaming.push(Prediction(b"first"))
            for caller, timeout in [
                (hurried, None),
                (hurried, 1.0),
                (hurried, 50.0),
                (hurried, math.nan),
                (streaming, None),
            ]:
                answer, _ = calls.begin(caller, timeout=timeout)
                await answer
            left = [round(job.deadline - now) if job.deadline < math.inf else 0 for job in seen]
            assert left == [5, 1, 5, 5, 0]
            assert [job.priority for job in seen] == [Priority.HIGH] * 4 + [Priority.NORMAL]
            assert [job.input.id for job in seen] == [f"caller.{n}" for n in range(1, 6)]

    run(scenario())


def test_a_call_without_time_left_is_refused(run, serve_model):
    async def scenario():
        async with serve_model() as model:
            calls = Calls(model)
            with pytest.raises(RequestExpired):
                calls.begin(calls.job(deadline=time.monotonic() - 1))
            assert calls.leftovers == NOTHING

    run(scenario())


def test_a_model_that_waits_for_the_call_is_not_called(run, serve_model, monkeypatch):
    async def scenario():
        async with serve_model(fakes.Life(predict=["hang"])) as model:
            calls = Calls(model)
            with pytest.raises(CyclicCall, match=r"itself: m 1\.0 -> m 1\.0"):
                calls.begin(name="m")
            _, first = calls.begin(name="a")
            with pytest.raises(CyclicCall, match=r"m 1\.0 -> m 1\.0"):
                calls.begin(first.ticket, name="m")
            monkeypatch.setattr(model_calls, "MAX_DEPTH", 2)
            with pytest.raises(CyclicCall, match=r"At most 2 .* a 1\.0 -> b 1\.0 -> m 1\.0"):
                # As if the model had been called as b: the worker's side passes the caller.
                calls.begin(first.ticket, name="b")
            first.cancel()
            assert calls.leftovers == NOTHING

    run(scenario())


def test_models_that_wait_for_each_other_do_so_only_while_there_is_room(run, serve_model):
    async def scenario():
        async with AsyncExitStack() as opened:
            hanging = fakes.Life(predict=["hang"])
            model = await opened.enter_async_context(
                serve_model(hanging, asynchronous=True, outstanding_batches=1)
            )
            calls = Calls(model)
            assert model.has_capacity
            waiting = [calls.begin()[1]]  # a waits for m …
            await fakes.drain_loop()
            assert not model.has_capacity
            waiting.append(calls.begin()[1])  # … and so may another
            calls.of._waiting["m", "1.0"]["b", "1.0"] += 1  # but when m waits for b, which …
            with pytest.raises(ServerBusy, match=r"b 1\.0 and m 1\.0 wait for each other"):
                calls.begin(name="b")  # … cannot have a place in m, it does not wait for one
            del calls.of._waiting["m", "1.0"]
            for ticket in waiting:
                ticket.cancel()
            assert calls.leftovers == NOTHING

    run(scenario())


def test_calls_are_bounded_in_size(run, serve_model):
    async def scenario():
        async with serve_model(fakes.Life(predict=["hang"])) as model:
            calls = Calls(model)
            with pytest.raises(PayloadTooLarge):
                calls.begin(body=bytes(101))
            _, first = calls.begin(body=bytes(100))
            with pytest.raises(TooMuchInFlight):
                calls.begin(body=bytes(51))
            _, second = calls.begin(body=bytes(50))
            first.cancel()
            second.cancel()
            assert calls.leftovers == NOTHING

    run(scenario())


@pytest.mark.parametrize("in_pieces", [False, True])
def test_answers_count_until_the_caller_has_read_them(run, serve_model, in_pieces):
    answers = [pieces(bytes(50), bytes(50)) for _ in range(3)] if in_pieces else []

    async def scenario():
        async with serve_model(fakes.Life(predict=answers)) as model:
            calls = Calls(model)
            calls.reads = False
            body = b"" if in_pieces else bytes(100)
            assert len((await calls.begin(body=body)[0]).body) == 100
            assert calls.leftovers == ({}, {}, 100)
            if in_pieces:
                assert isinstance(await calls.begin()[0], TooMuchInFlight)
            else:
                with pytest.raises(TooMuchInFlight):
                    calls.begin(body=body)
            assert calls.leftovers == ({}, {}, 100)
            calls.unread[0]()
            assert calls.leftovers == NOTHING
            assert len((await calls.begin(body=body)[0]).body) == 100

    run(scenario())


def test_a_cancelled_call_gives_up_its_place(run, serve_model):
    async def scenario():
        async with serve_model(fakes.Life(predict=["hang"])) as model:
            calls = Calls(model)
            begun = [calls.begin() for _ in range(3)]
            assert (model.pending, len(model.queue)) == (3, 2)
            for answer, ticket in begun:
                ticket.cancel()
                assert not answer.done()
            assert (model.pending, len(model.queue)) == (0, 0)
            assert calls.leftovers == NOTHING

    run(scenario())


def pieces(*bodies: bytes) -> list[Piece | Reply]:
    *more, last = [
        [Prediction(body, headers={"k": "v", "ts_stream_next": "true"})] for body in bodies
    ]
    return [
        *[Piece(each, [0]) for each in more],
        Reply(predictions=last),
    ]


def test_an_answer_in_pieces_comes_whole(run, serve_model):
    async def scenario():
        lives = fakes.Life(
            predict=[pieces(b"a", b"b", b"c"), pieces(bytes(60), bytes(60)), b"junk"]
        )
        async with serve_model(lives) as model:
            calls = Calls(model)
            answer, _ = calls.begin()
            assert await answer == Prediction(b"abc", headers={"k": "v"})
            answer, _ = calls.begin()
            assert "longer than 100 bytes" in str(await answer)
            assert (calls.leftovers, model.pending) == (NOTHING, 0)

    run(scenario())


def test_an_answer_in_pieces_that_breaks_off_or_is_cancelled(run, serve_model):
    async def scenario():
        first = pieces(b"a", b"b")[0]
        failed = [first, Piece(code=503, message="It broke."), Reply(503, "It broke.")]
        async with serve_model(fakes.Life(predict=[failed, [first]])) as model:
            calls = Calls(model)
            answer, _ = calls.begin()
            assert str(await answer) == "The answer was broken off: It broke."
            answer, _ = calls.begin(timeout=1.0)
            assert str(await answer) == "The answer was not complete in time."
        async with serve_model(fakes.Life(predict=[[first]])) as model:
            calls = Calls(model)
            answer, ticket = calls.begin()
            await fakes.drain_loop()
            assert ticket._reading is not None
            ticket.cancel()
            await fakes.drain_loop()
            assert not answer.done()
            assert (calls.leftovers, model.pending) == (NOTHING, 0)

    run(scenario())


def test_calls_are_served_while_the_server_stops_and_not_by_a_model_that_is_gone(run, serve_model):
    async def scenario():
        async with serve_model() as model:
            calls = Calls(model)
            model.admission.refusal = ServerStopping
            answer, _ = calls.begin(body=b"still")
            assert (await answer).body == b"still"
            model.admission.refusal = partial(ModelNotFound, "Gone.")
            with pytest.raises(ServeError, match="Gone"):
                calls.begin()
            with pytest.raises(ModelNotFound):
                calls.begin(model="unknown")
            assert calls.leftovers == NOTHING

    run(scenario())
