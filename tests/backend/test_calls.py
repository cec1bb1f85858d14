"""`Context.infer` in a worker that runs, with a test in the place of the frontend."""

import asyncio

import pytest
from fake_frontend import PATIENCE, serving_handlers

from marserve.backend.calls import headers_and_parts
from marserve.backend.context import Context
from marserve.backend.model_answers import ModelCallFailed
from marserve.backend.protocol import (
    Call,
    CallReply,
    CancelCall,
    CancelPredict,
    Input,
    Part,
    Predict,
    Prediction,
    Reply,
)
from marserve.backend.service import Service


@pytest.fixture
def serving():
    """Run a worker with a handler; its end is seen to at the end of the test."""
    with serving_handlers(max_call_bytes=1000) as serve:
        yield serve


def test_a_call_goes_out_and_its_answer_comes_back(serving):
    async def handle(_data, context):
        answer = await context.infer("b", {"a": 1}, version="2.0", timeout=1.5)
        return [[answer.json(), answer.status, answer.headers]]

    frontend = serving(handle)
    frontend.predict(7)
    call = frontend.receive(Call)
    assert (call.batch, call.model, call.version, call.timeout) == (7, "b", "2.0", 1.5)
    assert call.headers == {"content-type": "application/json"}
    assert [(part.name, part.content_type) for part in call.parts] == [("body", "application/json")]
    frontend.send(CallReply(call.number, Prediction(b'"x"', 201, "", {"k": "v"})))
    assert b"".join(frontend.answer().split()) == b'["x",201,{"k":"v"}]'


def test_replies_may_come_in_any_order(serving):
    async def handle(_data, context):
        answers = await asyncio.gather(*[context.infer(model) for model in "abc"])
        return [" ".join(answer.text for answer in answers)]

    frontend = serving(handle)
    frontend.predict(1)
    calls = [frontend.receive(Call) for _ in range(3)]
    for call in reversed(calls):
        frontend.send(CallReply(call.number, Prediction(call.model.upper().encode())))
    assert frontend.answer() == b"A B C"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (CallReply(1, None, 404, "ModelNotFoundException", "No."), (500, 404, "No.")),
        (CallReply(1, None, 503, "X", "Later.", 7), (503, 503, "Later.")),
        (CallReply(1, None, 504, "X", "Late."), (504, 504, "Late.")),
        (CallReply(1, None, 507, "X", "Full."), (507, 507, "Full.")),
        (CallReply(1, None, 500, "X", "Dead."), (500, 500, "Dead.")),
        (CallReply(1, Prediction(b" too\nbad\n", 422, "Odd")), (422, 422, "too bad")),
        (CallReply(1, Prediction(b'{"message": "No."}', 422, "Odd")), (422, 422, "No.")),
        (CallReply(1, Prediction(b'{"error": 1}', 422, "Odd")), (422, 422, '{"error": 1}')),
        (CallReply(1, Prediction(b"\xff\xfe", 422, "Odd")), (422, 422, "Odd")),
        (CallReply(1, Prediction(b"", 501, "Odd")), (500, 501, "Odd")),
    ],
)
def test_a_failed_call_is_an_exception_which_uncaught_has_a_status_for_the_client(
    reply, expected, serving
):
    seen = []

    async def handle(_data, context):
        try:
            await context.infer("b")
        except ModelCallFailed as error:
            seen.append(error)
            raise

    frontend = serving(handle)
    frontend.predict(1)
    frontend.receive(Call)
    frontend.send(reply)
    failure = frontend.receive(Reply)
    (error,) = seen
    assert (failure.code, error.status, error.reason) == expected
    assert failure.message == f'The call of model "b" failed with {error.status}: {error.reason}'
    assert (error.retry_after, error.answer is None) == (reply.retry_after, not reply.prediction)


def test_a_task_group_fails_as_the_call_in_it(serving):
    async def handle(_data, context):
        async with asyncio.TaskGroup() as group:
            for model in ("b", "c"):
                group.create_task(context.infer(model))

    frontend = serving(handle)
    frontend.predict(1)
    first, second = [frontend.receive(Call) for _ in range(2)]
    frontend.send(CallReply(first.number, None, 503, "X", "Later."))
    assert frontend.receive(CancelCall) == CancelCall(second.number)
    reply = frontend.receive(Reply)
    assert (reply.code, reply.message) == (503, 'The call of model "b" failed with 503: Later.')


def test_a_handler_that_waits_no_longer_cancels_its_call(serving):
    async def handle(_data, context):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(context.infer("b"), 0.01)
        return ["late"]

    frontend = serving(handle)
    frontend.predict(1)
    call = frontend.receive(Call)
    assert frontend.receive(CancelCall) == CancelCall(call.number)
    frontend.send(CallReply(call.number, Prediction(b"too late")))  # it was on its way
    assert frontend.answer() == b"late"


def test_a_task_that_outlives_its_request_gets_no_answer(serving):
    left = []

    async def two_calls(context):
        said = []
        for _ in range(2):
            try:
                await context.infer("b")
            except RuntimeError as error:
                said.append(str(error))
        return said

    async def handle(_data, context):
        if left:
            return [await left[0]]
        left.append(asyncio.ensure_future(two_calls(context)))
        await asyncio.sleep(0)
        return ["first"]

    frontend = serving(handle)
    frontend.predict(1)
    frontend.receive(Call)
    assert frontend.answer() == b"first"
    frontend.predict(2)
    assert frontend.answer().count(b"has been answered: await") == 2


def test_a_call_belongs_to_the_request_whose_task_makes_it(serving):
    """Handlers keep their context, and the one of the next request takes its place."""
    kept = []
    both = asyncio.Event()

    async def handle(_data, context):
        kept.append(context)
        if len(kept) == 2:
            both.set()
        await both.wait()
        return [(await kept[-1].infer("b")).text]

    frontend = serving(handle)
    frontend.predict(1)
    frontend.predict(2)
    calls = [frontend.receive(Call) for _ in range(2)]
    assert {call.batch for call in calls} == {1, 2}
    for call in calls:
        frontend.send(CallReply(call.number, Prediction(b"%d" % call.batch)))
    replies = [frontend.receive(Reply) for _ in range(2)]
    assert {reply.number: reply.predictions[0].body for reply in replies} == {1: b"1", 2: b"2"}


def test_a_task_that_serves_many_requests_calls_for_the_one_whose_context_it_has(serving):
    waiting = asyncio.Queue()
    tasks = []

    async def engine():
        while True:
            context, done = await waiting.get()
            done.set_result((await context.infer("b")).text)

    async def handle(_data, context):
        if not tasks:  # in the first request, which it outlives
            tasks.append(asyncio.ensure_future(engine()))
        done = asyncio.get_running_loop().create_future()
        waiting.put_nowait((context, done))
        answer = await done
        if answer == "last":
            tasks[0].cancel()
        return [answer]

    frontend = serving(handle)
    for number, text in enumerate([b"first", b"last"], 1):
        frontend.predict(number)
        call = frontend.receive(Call)
        assert call.batch == number
        frontend.send(CallReply(call.number, Prediction(text)))
        assert frontend.answer() == text


def test_a_call_from_a_thread_goes_through_the_loop(serving):
    async def handle(_data, context):
        loop = asyncio.get_running_loop()

        def in_thread():
            answer = asyncio.run_coroutine_threadsafe(
                context.infer("b"),
                loop,
            ).result(PATIENCE)
            with pytest.raises(RuntimeError, match="run_coroutine_threadsafe"):
                asyncio.run(context.infer("b"))
            return answer.text

        return [await loop.run_in_executor(None, in_thread)]

    frontend = serving(handle)
    frontend.predict(1)
    frontend.send(CallReply(frontend.receive(Call).number, Prediction(b"through")))
    assert frontend.answer() == b"through"


def test_a_call_too_large_never_leaves(serving):
    async def handle(_data, context):
        with pytest.raises(ModelCallFailed, match=r"413: .*max_request_size"):
            await context.infer("b", bytes(1001))
        with pytest.raises(ValueError, match="1 MiB"):
            await context.infer("b", headers={"x": "x" * (1 << 20)})
        with pytest.raises(ValueError, match="more than 0"):
            await context.infer("b", timeout=0)
        return [(await context.infer("b", bytes(1000))).text]

    frontend = serving(handle)
    frontend.predict(1)
    frontend.send(CallReply(frontend.receive(Call).number, Prediction(b"fits")))
    assert frontend.answer() == b"fits"


def test_more_than_the_socket_takes_is_sent_in_order(serving):
    async def handle(data, _context):
        return [bytes(data[0]["body"]) * 1_000_000]

    frontend = serving(handle)
    for number in range(1, 9):
        frontend.predict(number)
    replies = [frontend.receive(Reply) for _ in range(8)]
    assert [reply.number for reply in replies] == [*range(1, 9)]
    assert {bytes(reply.predictions[0].body) for reply in replies} == {b"x" * 1_000_000}


def test_there_is_nothing_to_call_without_a_request_of_a_coroutine():
    context = Context("m", "/m", None, 1, None, "1")
    with pytest.raises(RuntimeError, match="asyncCommunication"):
        context.infer("b")
    reply = Service(lambda _data, context: [context.infer("b")], context).predict(
        Predict([Input("1", {}, [])])
    )
    assert reply.code == 503


@pytest.mark.parametrize(
    ("data", "given", "headers", "kind", "body"),
    [
        (b"\0", {}, {}, "", b"\0"),
        (memoryview(b"\0"), {}, {}, "", b"\0"),
        (None, {}, {}, "", b""),
        ("ä", {}, {"content-type": "text/plain"}, "text/plain", "ä".encode()),
        ([1], {}, {"content-type": "application/json"}, "application/json", b"[\n  1\n]"),
        (b"1", {"Content-Type": "A/b; c"}, {"Content-Type": "A/b; c"}, "a/b", b"1"),
        (b"1", {"x": 5}, {"x": "5"}, "", b"1"),
    ],
)
def test_data_is_sent_as_http_clients_would(data, given, headers, kind, body):
    assert headers_and_parts(data, None, given) == (headers, [Part("body", kind, body)])


def test_named_parts_are_sent_each_with_its_type():
    parts = {"image": b"\1", "text": "a", "top": 5}
    assert headers_and_parts(None, parts, {}) == (
        {},
        [
            Part("image", "", b"\1"),
            Part("text", "text/plain", b"a"),
            Part("top", "application/json", b"5"),
        ],
    )
    with pytest.raises(TypeError, match="either data or parts"):
        headers_and_parts(b"", parts, {})


def test_a_request_cancelled_before_it_begins_has_a_reply(serving):
    async def handle(_data, _context):
        await asyncio.sleep(PATIENCE)

    frontend = serving(handle)
    request = Predict([Input("id", {}, [])], 3)
    # In one read of the worker.
    frontend.send_at_once(request, CancelPredict(3))
    reply = frontend.receive(Reply)
    assert (reply.number, reply.predictions) == (3, [])
    frontend.predict(4)
    frontend.send(CancelPredict(4))
    assert frontend.receive(Reply).number == 4
