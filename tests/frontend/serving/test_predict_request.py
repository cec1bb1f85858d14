import asyncio
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import fakes
import pytest
from steps import page_of, result_of

from marserve.backend.protocol import Input, Part, Piece, Prediction, Reply
from marserve.frontend.batching.jobs import Answer, Stream
from marserve.frontend.errors import (
    Overloaded,
    PredictionFailed,
    RequestExpired,
    ServeError,
    WorkerDied,
)
from marserve.frontend.operations.describe import customized_metadata
from marserve.frontend.security.usage import RequestMemory
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.predict_request import (
    PredictRequest,
    RequestOptions,
)
from marserve.frontend.serving.request_rows import jobs_of
from marserve.frontend.telemetry.metrics import Metrics

Call = Callable[..., Any]

#: The first piece of an answer.
PIECE = Piece([Prediction(b"piece")], [0])


def test_a_request_gets_its_prediction(run, serve_model, ask):
    async def scenario():
        async with serve_model() as model:
            assert (await ask(model, b"cat")).body == b"cat"
            assert model.pending == 0

    run(scenario())


@pytest.mark.parametrize(
    ("answer", "error"), [(Reply(503, "no"), PredictionFailed), ("die", WorkerDied)]
)
def test_what_becomes_of_a_batch_becomes_of_its_requests(answer, error, run, serve_model, ask):
    async def scenario():
        async with serve_model(fakes.Life(predict=[answer])) as model:
            with pytest.raises(error):
                await ask(model)
            assert model.pending == 0

    run(scenario())


def test_a_client_that_leaves_gives_its_seat_back(run, serve_model, ask):
    async def scenario():
        async with serve_model(fakes.Life(seconds=1.0)) as model:
            [first, second, third] = [ask(model, body) for body in (b"a", b"b", b"c")]
            await fakes.drain_loop()
            second.cancel()
            await fakes.drain_loop()
            assert len(model.queue) == 1
            assert [answer.body for answer in await asyncio.gather(first, third)] == [b"a", b"c"]

    run(scenario())


@pytest.mark.parametrize(("describe", "header"), [(False, None), (True, "True")])
def test_a_client_cannot_ask_for_a_description_by_its_header(run, serve_model, describe, header):
    seen = []

    def answer(batch):
        seen.extend(input_.headers.get("describe") for input_ in batch.inputs)
        return fakes.echo(batch)

    async def scenario():
        async with serve_model(fakes.Life(predict=[answer])) as model:
            input_ = fakes.make_input(**({} if describe else {"describe": "True"}))
            arrived = asyncio.get_running_loop().time()
            await model.predict(fakes.make_request(input_, arrived, describe=describe))
            assert seen == [header]

    run(scenario())


def test_rows_leave_together_and_are_answered_in_order(run, serve_model, answers_to):
    async def scenario():
        seen = []

        def answer(batch):
            seen.append(len(batch.inputs))
            return fakes.echo(batch)

        async with serve_model(fakes.Life(predict=[answer]), batching={"size": 4}) as model:
            rows = [b"%d" % number for number in range(10)]
            assert await answers_to(model, *rows) == rows
            assert seen == [4, 4, 2]
            assert model.pending == 0

    run(scenario())


@pytest.mark.parametrize("retries", [True, False])
@pytest.mark.parametrize(
    ("answer", "error"), [(Reply(503, "no"), PredictionFailed), ("die", WorkerDied)]
)
def test_a_row_that_fails_leaves_none_of_the_others(
    answer, error, retries, run, serve_model, answers_to
):
    async def scenario():
        batching = {"size": 3, "isolates": retries, "retries": retries}
        async with serve_model(fakes.Life(predict=[answer]), batching=batching) as model:
            with pytest.raises(error):
                await answers_to(model, *[b"x"] * 7)
            assert (len(model.queue), model.pending) == (0, 0)
            await fakes.drain_loop()
        gc.collect()  # reports failures that were not retrieved, for which `run` raises

    run(scenario())


def test_a_client_that_leaves_gives_the_seats_of_its_rows_back(run, serve_model, answers_to):
    async def scenario():
        async with serve_model(fakes.Life(seconds=1.0)) as model:
            waiting = asyncio.ensure_future(answers_to(model, *[b"x"] * 3))
            await asyncio.sleep(1.5)
            assert (len(model.queue), model.pending) == (1, 2)
            waiting.cancel()
            await fakes.drain_loop()
            assert (len(model.queue), model.pending) == (0, 0)

    run(scenario())


@pytest.mark.parametrize(
    ("first", "found"),
    [
        pytest.param(Reply(predictions=[Prediction(b"1")]), "later", id="fails later"),
        pytest.param(Reply(predictions=[Prediction(b"1", 400)]), [400], id="status"),
        pytest.param(Reply(503, "first"), "first", id="failure"),
        pytest.param(
            [PIECE, Reply(predictions=[Prediction(b"")])], "streams its answers", id="stream"
        ),
    ],
)
def test_the_first_row_that_is_not_200_speaks_for_all(run, serve_model, first, found):
    """The first in order: the other row has failed a second before."""

    async def scenario():
        lives = [
            fakes.Life(predict=[first], seconds=2.0),
            fakes.Life(predict=[Reply(503, "later")]),
        ]
        async with serve_model(*lives, workers=2) as model:
            request = fakes.make_request(fakes.make_input(b"x"))
            answers = []
            rows = result_of(jobs_of(request, [request.input] * 3))
            model.submit_all(request, rows, answers.append)
            await asyncio.sleep(5.0)
            [answer] = answers
            if isinstance(answer, ServeError):
                assert found in answer.message
            else:
                assert [prediction.status for prediction in answer] == found
            assert (len(model.queue), model.pending) == (0, 0)

    run(scenario())


def test_the_pieces_of_a_later_row_do_not_wait_in_memory_for_the_first(run, serve_model):
    async def scenario():
        lives = [
            fakes.Life(predict=[Reply(predictions=[Prediction(b"1")])], seconds=2.0),
            fakes.Life(predict=[[PIECE] * 3]),  # and it never ends
        ]
        async with serve_model(*lives, workers=2) as model:
            request = fakes.make_request(fakes.make_input(b"x"))
            answers = []
            rows = result_of(jobs_of(request, [request.input] * 2))
            model.submit_all(request, rows, answers.append)
            await asyncio.sleep(1.0)
            streams = [each for each in gc.get_objects() if type(each) is Stream]
            assert not any(stream.is_open for stream in streams)
            assert answers == []
            await asyncio.sleep(4.0)
            assert "streams its answers" in str(answers)

    run(scenario())


# -- what a transport may rely on ------------------------------------------------------------------


class Transport:
    """Submits one request and keeps what it is answered."""

    def __init__(self, model: ModelVersion, input_: Input, **members: Any) -> None:
        self.answers: list[Answer] = []
        request = PredictRequest(input_, RequestMemory(), time.monotonic(), False, **members)
        self.ticket = model.submit(request, self.on_answer)

    def on_answer(self, answer: Answer) -> None:
        self.answers.append(answer)


class WatchedInput(Input):
    """An input that may be referred to weakly."""


def test_nothing_is_answered_before_the_request_is_submitted(run, serve_model, monkeypatch):
    """The batcher may refuse it at once, and its transport does not have the ticket yet."""

    async def scenario():
        async with serve_model() as model:
            refusal = Overloaded(1.0)
            monkeypatch.setattr(model.batcher, "put", lambda job, **_: job.fail(refusal))
            stays, leaves = (Transport(model, fakes.make_input()) for _ in range(2))
            assert (stays.answers, model.pending) == ([], 2)
            leaves.ticket.cancel()
            await fakes.drain_loop()
            assert (stays.answers, leaves.answers, model.pending) == ([refusal], [], 0)

    run(scenario())


def test_a_ticket_can_be_cancelled_at_any_time(run, serve_model):
    async def scenario():
        async with serve_model(fakes.Life(seconds=1.0)) as model:
            answered, running, waiting = (Transport(model, fakes.make_input()) for _ in range(3))
            await asyncio.sleep(1.5)
            assert (len(answered.answers), model.pending) == (1, 2)
            for _ in range(2):
                for transport in (answered, running, waiting):
                    transport.ticket.cancel()
            assert (len(model.queue), model.pending) == (0, 0)
            await asyncio.sleep(5.0)
            assert [len(transport.answers) for transport in (answered, running, waiting)] == [
                1,
                0,
                0,
            ]

    run(scenario())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_stream_is_pending_until_it_is_closed(run, serve_model, leaves):
    metrics = Metrics("host")
    last = Reply(predictions=[Prediction(b"last")])

    async def scenario():
        async with serve_model(fakes.Life(predict=[[PIECE, last]]), metrics=metrics) as model:
            transport = Transport(model, fakes.make_input(), options=RequestOptions(timeout=1.0))
            await asyncio.sleep(5.0)  # the first piece was in time
            [stream] = transport.answers
            assert isinstance(stream, Stream)
            assert model.pending == 1
            if leaves:
                transport.ticket.cancel()
            else:
                assert [bytes(piece) async for piece in stream.pieces()] == [b"piece", b"last"]
                stream.close()
            assert (stream.is_open, model.pending) == (False, 0)
            labels = {"model_name": "m", "model_version": "default", "hostname": "host"}
            microseconds = fakes.sample_value(metrics, "ts_inference_latency_microseconds", labels)
            assert microseconds == (None if leaves else pytest.approx(5_000_000))

    run(scenario())


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("answered", None),
        ("failed", None),
        ("streamed", None),
        ("expired", "expired"),
        ("left", "client_gone"),
        ("workers end", "no_worker"),
    ],
)
def test_nothing_is_left_of_a_request_for_the_garbage_collector(run, serve_model, ending, reason):
    """What a server collects it collects rarely, and all requests wait meanwhile."""
    metrics = Metrics("host")
    last = Reply(predictions=[Prediction(b"last")])
    replies = {"failed": Reply(503, "no"), "streamed": [PIECE, last]}
    labels = {"model_name": "m", "model_version": "1.0", "hostname": "host", "reason": reason}

    async def scenario():
        life = fakes.Life(predict=[fakes.echo, replies.get(ending, fakes.echo)], seconds=2.0)
        async with serve_model(life, metrics=metrics) as model:
            ahead = Transport(model, fakes.make_input())
            options = RequestOptions(timeout=1.0 if ending == "expired" else 100.0)
            input_ = WatchedInput("id", {}, [Part("body", "", b"x")])
            transport = Transport(model, input_, options=options)
            left = weakref.ref(transport), weakref.ref(input_)
            del input_
            await asyncio.sleep(1.5)
            if ending == "left":
                transport.ticket.cancel()
            elif ending == "workers end":
                await model.workers.close(0)
            await asyncio.sleep(5.0)
            assert ahead.answers
            if ending == "streamed":
                transport.ticket.cancel()
            del transport
            assert [reference() for reference in left] == [None, None]
            if reason:
                rejected = "marserve_rejected_requests_total"
                assert fakes.sample_value(metrics, rejected, labels) == 1

    gc.collect()
    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()


def test_a_description_leaves_no_timer_behind_and_is_not_counted(run, serve_model):
    """It had two, of which only one was cancelled: the other kept the request for its time."""
    metrics = Metrics("host")

    async def scenario():
        life = fakes.Life(predict=[Reply(predictions=[Prediction(b'{"a": 1}')])])
        async with serve_model(life, metrics=metrics, client_timeout=50.0) as model:
            input_ = WatchedInput("id", {}, [])
            left = weakref.ref(input_)
            assert await customized_metadata(model, input_, RequestMemory()) == {"a": 1}
            del input_
            assert left() is None
            assert "ts_inference_requests_total{" not in page_of(metrics.registry)

    gc.collect()
    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("client_timeout", "message"),
    [(0.0, "did not describe its model within responseTimeout"), (5.0, "clientTimeoutInMills")],
)
def test_a_description_has_the_time_that_a_batch_has(
    run, loop, serve_model, client_timeout, message
):
    async def scenario():
        life = fakes.Life(seconds=60.0)
        changes = {"client_timeout": client_timeout, "response_timeout": 20.0}
        async with serve_model(life, **changes) as model:
            began = loop.time()
            with pytest.raises(RequestExpired, match=message):
                await customized_metadata(model, fakes.make_input(), RequestMemory())
            assert loop.time() - began == pytest.approx(client_timeout or 20.0)
            assert model.pending == 0

    run(scenario())
