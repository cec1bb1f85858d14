"""`Context.drain` in a worker that runs, with a test in the place of the frontend."""

import asyncio
from typing import Any

import pytest
from fake_frontend import PATIENCE, Frontend, serving_handlers

from marserve.backend.context import Context
from marserve.backend.protocol import CancelPredict, Piece, PiecesRead, Reply

WINDOW = 2500
SIZE = 1000


@pytest.fixture
def serving():
    """Run a worker with a handler, whose window is two and a half pieces."""
    with serving_handlers(stream_window=WINDOW) as serve:
        yield serve


async def stream(data: Any, context: Context) -> Any:
    """Answer with five pieces, or at once with the text ``now``."""
    if data[0]["body"] == b"now":
        return ["now"]
    for _ in range(5):
        context.send_intermediate([bytes(SIZE)])
        await context.drain()
    return ["end"]


def pieces(frontend: Frontend, count: int) -> None:
    """Receive pieces; the next message is the answer to another request."""
    for _ in range(count):
        assert len(frontend.receive(Piece).predictions[0].body) == SIZE
    frontend.predict(99, b"now")
    assert frontend.answer() == b"now"


def test_a_handler_waits_for_the_reader_of_its_answer_and_others_do_not(serving):
    frontend = serving(stream)
    frontend.predict(1)
    pieces(frontend, 3)  # 3000 bytes are unread
    frontend.send(PiecesRead(1, 499))
    pieces(frontend, 0)
    frontend.send(PiecesRead(1, 1))
    pieces(frontend, 1)
    frontend.send(PiecesRead(1, 3000))
    assert isinstance(frontend.receive(Piece), Piece)
    assert frontend.answer() == b"end"


def test_each_answer_has_a_window_of_its_own(serving):
    frontend = serving(stream)
    frontend.predict(1)
    pieces(frontend, 3)
    frontend.predict(2)
    pieces(frontend, 3)
    frontend.send(PiecesRead(2, 3 * SIZE))
    for _ in range(2):
        assert frontend.receive(Piece).number == 2
    assert frontend.receive(Reply).number == 2


def test_reads_of_an_answer_that_is_complete_are_ignored(serving):
    frontend = serving(stream)
    frontend.send(PiecesRead(7, SIZE))
    frontend.predict(1, b"now")
    assert frontend.answer() == b"now"
    frontend.send(PiecesRead(1, SIZE))
    frontend.predict(2, b"now")
    assert frontend.answer() == b"now"


def test_a_request_that_is_cancelled_does_not_wait_for_its_reader(serving):
    frontend = serving(stream)
    frontend.predict(1)
    pieces(frontend, 3)
    frontend.send(CancelPredict(1))
    assert frontend.receive(Reply).code == 503


def test_pieces_that_a_thread_sends_are_waited_for(serving):
    async def handle(data, context):
        loop = asyncio.get_running_loop()

        def work():
            for _ in range(5):
                context.send_intermediate([bytes(SIZE)])
                asyncio.run_coroutine_threadsafe(context.drain(), loop).result(PATIENCE)

        if data[0]["body"] != b"now":
            await asyncio.to_thread(work)
        return [data[0]["body"]]

    frontend = serving(handle)
    frontend.predict(1)
    pieces(frontend, 3)
    frontend.send(PiecesRead(1, 3 * SIZE))
    for _ in range(2):
        frontend.receive(Piece)
    assert frontend.answer() == b"x"


def test_what_waits_for_a_reader_goes_on_when_the_answer_is_complete(serving):
    ended = []

    async def wait(context):
        await context.drain()
        ended.append(1)

    async def handle(_data, context):
        if ended:
            return [str(len(ended))]
        context.send_intermediate([bytes(WINDOW + 1)])
        waiting = [asyncio.create_task(wait(context)) for _ in range(2)]
        await asyncio.sleep(0)
        context.waiting = waiting  # referred to until they end
        return [str(len(ended))]

    frontend = serving(handle)
    frontend.predict(1)
    frontend.receive(Piece)
    assert frontend.answer() == b"0"
    frontend.predict(2)
    assert frontend.answer() == b"2"


def test_a_worker_ends_while_a_handler_waits_for_a_reader(serving):
    frontend = serving(stream)
    frontend.predict(1)
    pieces(frontend, 3)  # the fixture ends the worker


def test_nothing_is_waited_for_without_a_server():
    asyncio.run(Context("m", "/m", None, 1, None, "1").drain())
