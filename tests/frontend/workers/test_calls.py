"""Calls of one worker: each is answered once, and ends with the job on whose behalf it is made."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import fakes
import pytest

from marserve.backend.framing import encode
from marserve.backend.protocol import (
    Call,
    CallReply,
    CancelCall,
    Load,
    Part,
    Predict,
    Prediction,
    Reply,
)
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import ModelNotFound, WorkerDied
from marserve.frontend.workers import calls as module
from marserve.frontend.workers.calls import WorkerCalls
from marserve.frontend.workers.connection import WorkerConnection
from marserve.frontend.workers.dispatch.asynchronous import Async

GONE = 499


class Models:
    """Stands for the models: keeps what was called, for the test to answer."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.read: list[str] = []
        self.called = asyncio.Event()

    def call(self, caller: Job, call: Call, on_answer: Any) -> Any:
        if call.model == "none":
            raise ModelNotFound("No such model.")
        on_read = partial(self.read.append, call.model)
        self.answers[call.model] = partial(on_answer, on_read=on_read)
        self.called.set()
        return Ticket(partial(self.cancelled.append, call.model))


class Ticket:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


@pytest.fixture
def models():
    return Models()


@pytest.fixture
def replies():
    return []


@pytest.fixture
def calls(models, replies):
    return WorkerCalls(models.call, lambda reply, *_on_read: replies.append(reply))


@pytest.fixture
def job():
    return Job(fakes.make_input(), 0.0, lambda _answer: None)


def call(number: int, model: str, batch: int = 1) -> Call:
    return Call(number, batch, model, "", None, {}, [])


def test_each_call_gets_the_answer_to_it(calls, job, models, replies):
    for number, model in enumerate("abc"):
        calls.begin(job, call(number, model))
    models.answers["b"](Prediction(b"B"))
    models.answers["a"](WorkerDied("It fell."))
    assert replies == [
        CallReply(1, Prediction(b"B")),
        CallReply(0, None, 500, "InternalServerException", "Worker died. It fell."),
    ]
    assert calls.has_unanswered
    models.answers["c"](Prediction(b"C"))
    assert not calls.has_unanswered
    assert models.cancelled == []


def test_a_call_that_is_refused_is_answered_at_once(calls, job, replies):
    calls.begin(job, call(1, "none"))
    assert replies == [CallReply(1, None, 404, "ModelNotFoundException", "No such model.")]
    assert not calls.has_unanswered


@pytest.mark.parametrize("end", ["resolve", "cancel", "fail"])
def test_calls_end_with_the_job_on_whose_behalf_they_are(end, calls, job, models, replies):
    other = Job(job.input, 0.0, lambda _answer: None)
    calls.begin(job, call(1, "a"))
    calls.begin(job, call(2, "b"))
    calls.begin(other, call(3, "c", batch=2))
    if end == "cancel":
        job.cancel()
    elif end == "fail":
        job.fail(WorkerDied())
    else:
        job.resolve(Prediction(b""))
    assert sorted(models.cancelled) == ["a", "b"]
    assert sorted((reply.number, reply.status) for reply in replies) == [(1, GONE), (2, GONE)]
    calls.begin(job, call(4, "d"))
    assert replies[-1].status == GONE
    models.answers["c"](Prediction(b""))
    assert not calls.has_unanswered


def test_calls_end_with_a_stream_that_is_not_read_any_more(calls, job, models):
    calls.begin(job, call(1, "before"))
    job.push(Prediction(b"first"))
    calls.begin(job, call(2, "after"))
    assert models.cancelled == []
    assert job.stream is not None
    job.stream.close()
    assert sorted(models.cancelled) == ["after", "before"]


def test_what_the_handler_cancels_is_not_answered(calls, job, models, replies):
    calls.begin(job, call(1, "a"))
    calls.cancel(1)
    calls.cancel(1)
    calls.cancel(99)
    job.cancel()
    assert (models.cancelled, replies, calls.has_unanswered) == (["a"], [], False)


def test_a_worker_has_a_bounded_number_of_calls(calls, job, replies, monkeypatch):
    monkeypatch.setattr(module, "MAX_CALLS", 2)
    for number in range(3):
        calls.begin(job, call(number, "a"))
    assert [(reply.number, reply.status) for reply in replies] == [(2, 503)]


def test_a_number_in_use_is_no_other_calls(calls, job, models, replies):
    calls.begin(job, call(1, "a"))
    calls.begin(job, call(1, "b"))
    assert list(models.answers) == ["a"]
    assert [reply.status for reply in replies] == [GONE]


def bytes_of(*messages: Any) -> bytes:
    return b"".join(b"".join(encode(message)) for message in messages)


def test_a_worker_that_dies_takes_its_calls_along(run, served, models):
    def call_and_wait(batch):
        return bytes_of(call(1, "a", batch.number))

    async def scenario():
        way = partial(Async, timeout=None, call_model=models.call)
        lives = [{"predict": [call_and_wait]}, {}]
        async with served(way, lives=lives) as put:
            job = put("x")
            await models.called.wait()
            assert models.cancelled == []
            put.workers[0].crash()
            assert (await job.future).body == b"x"  # by the next worker
            assert models.cancelled == ["a"]

    run(scenario())


def test_calls_come_from_asynchronous_handlers_only_and_of_jobs_in_hand(run, models):
    load = Load("m", "/m", "h", 1, None, True, 1000, "1", max_call_bytes=20_000_000)
    large = Call(5, 9, "large", "", None, {}, [Part("body", "", bytes(20_000_000))])
    sent = bytes_of(call(1, "a", 9), CancelCall(1), large, Reply(503, "done", number=1))

    async def scenario(*, asynchronous):
        worker = fakes.FakeWorker(1, fakes.Life(predict=[sent]))
        connection = await WorkerConnection.from_socket(worker.sock, max_response_bytes=1000)
        replies = []
        if asynchronous:
            reply = lambda reply, *_on_read: replies.append(reply)  # noqa: E731
            connection.calls = WorkerCalls(models.call, reply)
        try:
            await connection.load(load, 5.0, 5.0)
            done = asyncio.Event()
            connection.on_lost = done.set
            connection.predict(Predict([fakes.make_input()]), None, lambda _: done.set(), object())
            await done.wait()
            return [reply.status for reply in replies] or str(connection.failure)
        finally:
            connection.close()
            await worker.stop(0)

    assert run(scenario(asynchronous=True)) == [GONE, GONE]
    assert run(scenario(asynchronous=False)) == "Backend worker sent Call unasked"


def test_a_worker_that_waits_for_a_call_is_not_taken_for_hung(run, served, models):
    def call_once(batch):
        return bytes_of(call(1, "a", batch.number))

    async def scenario():
        way = partial(Async, timeout=0.05, call_model=models.call)
        async with served(way, lives=[{"predict": [call_once]}, {}]) as put:
            loop = asyncio.get_running_loop()
            job = put("x")
            await models.called.wait()
            await asyncio.sleep(0.2)
            assert not job.future.done()
            began = loop.time()
            models.answers["a"](Prediction(b"A"))  # and now it is the worker's turn
            with pytest.raises(Exception, match="Worker died"):
                await job.future
            assert loop.time() - began < 1.0

    run(scenario())


def test_an_answer_that_the_worker_has_not_read_is_kept_track_of(run, models):
    async def scenario():
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        connection = await WorkerConnection.from_socket(ours, max_response_bytes=1000)
        loop = asyncio.get_running_loop()
        with theirs:
            for model, size in (("small", 1), ("large", 10_000_000), ("third", 10_000_000)):
                answer = CallReply(1, Prediction(bytes(size)))
                connection.reply_to_call(answer, partial(models.read.append, model))
            assert models.read == ["small"]
            while len(models.read) < 3:
                await loop.sock_recv(theirs, 1 << 20)
            connection.reply_to_call(answer, partial(models.read.append, "again"))
            assert "again" not in models.read
            connection.close()
            assert models.read == ["small", "large", "third", "again"]

    run(scenario())
