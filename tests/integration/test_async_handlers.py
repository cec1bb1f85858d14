"""Handlers that are coroutines: many requests under way in one worker."""

import pytest

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def juggler(server, handlers):
    server.install(handlers / "juggler.py", "juggler", "asyncCommunication: true\n")
    return "juggler"


def ask(server, model, **orders):
    return server.predict(model, json=orders, stream=True)


def test_a_request_may_wait_for_a_later_one(server, juggler, background):
    first = background(lambda: ask(server, juggler, id="a", wait="b"))
    second = ask(server, juggler, id="b")
    answers = [first.result(), second]
    assert [answer.content for answer in answers] == [b"aend", b"bend"]
    assert [answer.headers["x-id"] for answer in answers] == ["a", "b"]


def test_many_requests_are_under_way_at_once(server, juggler, together):
    calls = [
        lambda n=n: ask(server, juggler, id=f"m{n}", wait=f"m{(n + 1) % 20}").content
        for n in range(20)
    ]
    assert together(calls) == [b"m%dend" % n for n in range(20)]


def test_each_request_streams_by_itself(server, juggler, background):
    slow = background(lambda: ask(server, juggler, id="s", pieces=3, wait="t").content)
    quick = ask(server, juggler, id="t", pieces=2).content
    assert (quick, slow.result()) == (b"t0;tend", b"s0;s1;send")


def test_a_failure_is_one_requests_alone(server, juggler, background):
    waiting = background(lambda: ask(server, juggler, id="w", wait="x"))
    assert ask(server, juggler, id="y", fail="raise").status_code == 503
    assert ask(server, juggler, id="x").content == b"xend"
    assert waiting.result().status_code == 200


def test_a_request_that_ends_its_worker_dies_of_the_second_and_takes_nobody_along(
    server, juggler, background
):
    waiting = background(lambda: ask(server, juggler, id="p", wait="r"))
    assert ask(server, juggler, id="o", wait="p").content == b"oend"
    died = ask(server, juggler, id="q", wait="p", fail="exit")
    assert died.status_code == 500
    assert died.json()["message"].startswith("Worker died. Its process ")
    assert ask(server, juggler, id="r").content == b"rend"
    assert waiting.result().content == b"pend"
    assert server.worker(juggler)["status"] == "READY"


def test_a_timeout_that_was_asked_for_ends_a_worker_that_owes_too_long(server, handlers):
    config = "asyncCommunication: true\nresponseTimeout: 1\n"
    server.install(handlers / "juggler.py", "impatient", config)
    assert ask(server, "impatient", id="a", wait="never").status_code == 500
    assert ask(server, "impatient", id="b").content == b"bend"


def test_a_function_that_is_a_coroutine_serves(server):
    source = "async def handle(data, context):\n    return ['ok'] * len(data or [])\n"
    server.install(source, "coroutine", "asyncCommunication: true\n")
    assert server.describe("coroutine")["outstandingBatches"] == 1000
    assert ask(server, "coroutine", id="a").content == b"ok"


def test_a_question_that_is_never_answered_has_an_end(server):
    source = (
        "import asyncio\n"
        "async def handle(data, context):\n"
        "    await asyncio.sleep(0 if data is None else 3600)\n"
    )
    server.install(source, "silent", "asyncCommunication: true\nresponseTimeout: 1\n")
    answer = server.management("GET", "/models/silent?customized=true")
    assert answer.status_code in (500, 504)


@pytest.mark.parametrize(
    "body",
    [
        "raise asyncio.CancelledError",
        "raise BaseException",  # was never answered
        "context.stopping_criteria = 5; return data",
        "context.metrics = None; return data",
        "return data",
    ],
)
def test_whatever_a_handler_does_its_request_is_answered(server, body):
    """The last one cannot be given a context of its own."""
    lock = "import threading; context.lock = threading.Lock()" if body == "return data" else "pass"
    source = (
        "import asyncio\n"
        "class Odd:\n"
        f"    def initialize(self, context): {lock}\n"
        f"    async def handle(self, data, context): {body}\n"
    )
    name = f"odd{len(body)}"
    server.install(source, name, "asyncCommunication: true\n")
    statuses = [ask(server, name).status_code for _ in range(2)]
    assert statuses in ([503, 503], [200, 200])
    assert server.worker(name)["status"] == "READY"


def test_a_piece_that_comes_too_late_hurts_nobody(server, background):
    source = (
        "import asyncio\n"
        "class Late:\n"
        "    def initialize(self, context):\n"
        "        self.tasks = []\n"
        "    async def handle(self, data, context):\n"
        "        if data[0]['body'] == b'wait':\n"
        "            await asyncio.gather(*self.tasks, return_exceptions=True)\n"
        "            return ['waited']\n"
        "        async def later(send):\n"
        "            await asyncio.sleep(0)\n"
        "            send(['late'], None, '', 200)\n"
        "        send = context.on_intermediate\n"
        "        self.tasks.append(asyncio.get_running_loop().create_task(later(send)))\n"
        "        return ['done']\n"
    )
    server.install(source, "late", "asyncCommunication: true\n")
    assert server.predict("late", data=b"go").content == b"done"
    assert server.predict("late", data=b"wait").content == b"waited"
    assert server.predict("late", data=b"wait").content == b"waited"


def test_requests_under_way_in_a_coroutine_had_no_bound(server, tmp_path, background, wait_for):
    gate = tmp_path / "gate"
    source = f"""
import asyncio
from pathlib import Path

async def handle(data, context):
    while data and not Path({str(gate)!r}).exists():
        await asyncio.sleep(0.01)
    return data and ["in time"]
"""
    config = "asyncCommunication: true\noutstandingBatches: 2\njobQueueSize: 3\n"
    server.install(source, "bounded", config)
    asked = [background(server.predict, "bounded") for _ in range(20)]
    wait_for(lambda: sum(answer.done() for answer in asked) == 15)
    gate.touch()
    answers = sorted(answer.result().status_code for answer in asked)
    assert answers == [200] * 5 + [503] * 15


def test_a_coroutine_in_a_decorator_that_is_called_as_a_function(server):
    source = """
import functools
def decorated(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call
class Handler:
    def initialize(self, context):
        pass
    @decorated
    async def handle(self, data, context):
        return [b"fine"] * len(data)
"""
    server.install(source, "decorated")
    assert server.predict("decorated").status_code == 503
    told = "The handler returned coroutine, not a list: model-config.yaml needs asyncCommunication"
    server.wait_logged("model_log.log", told)
