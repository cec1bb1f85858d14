"""The express lane at a real listener, in virtual time."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Answer as Outcome
from marserve.frontend.batching.jobs import OnAnswer
from marserve.frontend.batching.streams import Stream
from marserve.frontend.errors import PredictionFailed
from marserve.frontend.http.express import Whole
from marserve.frontend.http.request_bodies import read_body
from marserve.frontend.http.responses import Answer
from marserve.frontend.http.router import HttpRequest, Route

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def post(body: bytes, path: str = "desk", *headers: str) -> bytes:
    lines = [f"POST /{path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def answer(client: Client) -> tuple[int, bytes]:
    """Status and body of the next answer."""
    head = await client[0].readuntil(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")[:-2]
    fields = dict(line.lower().split(b": ", 1) for line in lines)
    body = await client[0].readexactly(int(fields[b"content-length"]))
    return int(status.split()[1]), body


class Request:
    """One that was queued at the `Desk`, and the ticket for it."""

    def __init__(self, body: bytes, on_answer: OnAnswer) -> None:
        self.body = body
        self.is_cancelled = False
        self._on_answer: OnAnswer | None = on_answer

    def cancel(self) -> None:
        self.is_cancelled = True
        self._on_answer = None

    def answer(self, outcome: Outcome | None = None) -> None:
        """Answer it; with its own body, if nothing else is given."""
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is not None:
            on_answer(outcome or Prediction(b"express " + self.body))


class Desk:
    """Queues what comes by the express lane; answers the other way at once.

    Attributes:
        queue: What waits.
        raises: What happens to the next one instead.
        is_plain: Whether anything is.
    """

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Request] = asyncio.Queue()
        self.raises: Exception | None = None
        self.is_plain = True
        self.routes = {
            "desk": Route(self._serve, express=self._express),
            "other": Route(self._serve),
        }

    def _express(self, request: Whole, on_answer: OnAnswer) -> Request | None:
        if self.raises is not None:
            raise self.raises
        if not self.is_plain:
            return None
        queued = Request(request.body.read_nowait(), on_answer)
        self.queue.put_nowait(queued)
        return queued

    async def _serve(self, visit: HttpRequest) -> Answer:
        return Answer(200, b"ordinary " + await read_body(visit.request, 1 << 20))

    async def answer(self, answered: Outcome | None = None) -> None:
        """Answer whoever comes next."""
        (await self.queue.get()).answer(answered)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def at_desk(listen: Callable[..., None], desk: Desk) -> Callable[..., None]:
    """Run a test that gets the listener with the desk behind it."""
    return lambda test: listen(test, desk.routes)


def test_a_plain_request_is_queued_and_answered_without_a_task(
    at_desk: Callable[..., None], desk: Desk
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        for body in (b"a", b"", b"b" * 10_000):
            client[1].write(post(body))
            request = await desk.queue.get()
            tasks = len(asyncio.all_tasks())
            request.answer()
            assert len(asyncio.all_tasks()) == tasks
            assert await answer(client) == (200, b"express " + body)

    at_desk(test)


@pytest.mark.parametrize(
    "special",
    [
        pytest.param(post(b"x").replace(b"1.1", b"1.0"), id="HTTP/1.0"),
        pytest.param(post(b"x", "desk", "Connection: close"), id="close"),
        pytest.param(post(b"x", "other"), id="a route without a lane"),
        pytest.param(
            post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            + b"1\r\nx\r\n0\r\n\r\n",
            id="chunked",
        ),
        pytest.param(post(b"x", "desk", "Connection: upgrade", "Upgrade: websocket"), id="upgrade"),
    ],
)
def test_what_is_special_goes_the_other_way(
    at_desk: Callable[..., None], desk: Desk, special: bytes
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        client[1].write(special)
        assert await answer(client) == (200, b"ordinary x")
        assert desk.queue.empty()

    at_desk(test)


def test_what_a_route_does_not_take_goes_the_other_way(
    at_desk: Callable[..., None], desk: Desk
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        desk.is_plain = False
        client[1].write(post(b"form"))
        assert await answer(client) == (200, b"ordinary form")
        desk.is_plain = True
        client[1].write(post(b"plain"))
        await desk.answer()
        assert await answer(client) == (200, b"express plain")

    at_desk(test)


def _behind() -> list[Any]:
    """Pieces that come while an errand is under way, and what is answered to them."""
    a, b = post(b"a"), post(b"b", "other")
    both = [b"ordinary a", b"ordinary b"]
    return [
        pytest.param([a, b], both, id="one after the other"),
        pytest.param([b + a], both[::-1], id="in one piece"),
        pytest.param([(a + b)[at : at + 7] for at in range(0, len(a + b), 7)], both, id="torn"),
        pytest.param([post(b"x" * 100)[:-1], b"x"], [b"ordinary " + b"x" * 100], id="slow body"),
        pytest.param([a * 100], both[:1] * 100, id="a hundred"),
    ]


@pytest.mark.parametrize(("pieces", "answers"), _behind())
def test_answers_go_out_in_the_order_of_requests(
    at_desk: Callable[..., None], desk: Desk, fakes: Any, pieces: list[bytes], answers: list[bytes]
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        client[1].write(post(b"first"))
        first = await desk.queue.get()
        for piece in pieces:
            client[1].write(piece)
            await fakes.settled()
        assert desk.queue.empty()
        first.answer()
        assert await answer(client) == (200, b"express first")
        for body in answers:
            assert await answer(client) == (200, body)
        client[1].write(post(b"last"))
        await desk.answer()
        assert await answer(client) == (200, b"express last")

    at_desk(test)


def test_what_is_no_request_is_refused_behind_the_answer(
    at_desk: Callable[..., None], desk: Desk, fakes: Any
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        client[1].write(post(b"first"))
        first = await desk.queue.get()
        client[1].write(b"\0\0\0\r\n\r\n")
        await fakes.settled()
        first.answer()
        assert await answer(client) == (200, b"express first")
        assert (await answer(client))[0] == 400
        assert await client[0].read() == b""

    at_desk(test)


def test_a_client_cannot_fill_the_memory_behind_an_errand(
    at_desk: Callable[..., None], desk: Desk, fakes: Any
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        client[1].write(post(b"first"))
        await desk.queue.get()
        count = 200_000
        client[1].write(post(b"x" * 100) * count)
        for _ in range(20):
            await fakes.settled()
        assert client[1].transport.get_write_buffer_size() > count * 50

    at_desk(test)


def test_neither_an_errand_nor_idling_has_the_deadline_of_a_head(
    at_desk: Callable[..., None], desk: Desk
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        for _ in range(2):
            client[1].write(post(b"x"))
            await asyncio.sleep(10_000)
            await desk.answer()
            assert await answer(client) == (200, b"express x")
            await asyncio.sleep(1000)

    at_desk(test)


@pytest.mark.parametrize("errand_seconds", [0, 30, 100])
def test_a_head_that_stops_has_a_deadline_but_the_answer_comes_first(
    at_desk: Callable[..., None], desk: Desk, errand_seconds: float
) -> None:
    async def test(listener: Any) -> None:
        loop = asyncio.get_running_loop()
        client = await listener.connect()
        client[1].write(post(b"x"))
        request = await desk.queue.get()
        if not errand_seconds:
            request.answer()
        client[1].write(post(b"y")[:10])
        began = loop.time()
        await asyncio.sleep(errand_seconds)
        if errand_seconds:
            request.answer()
        assert await answer(client) == (200, b"express x")
        assert await client[0].read() == b""
        due = 60 if errand_seconds < 60 else 120
        assert loop.time() - began == pytest.approx(due, abs=1)

    at_desk(test)


def test_a_connection_that_is_not_used_any_more_ends(
    at_desk: Callable[..., None], desk: Desk
) -> None:
    async def test(listener: Any) -> None:
        loop = asyncio.get_running_loop()
        client = await listener.connect()
        client[1].write(post(b"x"))
        await asyncio.sleep(10_000)  # longer than a connection may idle
        await desk.answer()
        assert await answer(client) == (200, b"express x")
        began = loop.time()
        assert await client[0].read() == b""
        assert loop.time() - began == pytest.approx(3630, abs=1)

    at_desk(test)


@pytest.mark.parametrize("ends", ["close", "abort", "half-close"])
def test_a_client_that_leaves_is_not_waited_for(
    at_desk: Callable[..., None], desk: Desk, fakes: Any, ends: str
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        client[1].write(post(b"x") + post(b"y")[:20])
        request = await desk.queue.get()
        if ends == "half-close":
            client[1].write_eof()
        elif ends == "abort":
            client[1].transport.abort()
        else:
            client[1].close()
        await fakes.settled()
        assert request.is_cancelled

    at_desk(test)


FAILED = PredictionFailed("no", status=507)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        pytest.param(FAILED, 507, id="failure"),
        pytest.param(Prediction(b"no", 404), 404, id="status of the handler"),
        pytest.param(Prediction(b"", 7), 500, id="impossible status"),
        pytest.param(Prediction(b"", 200, "", {"a b": ""}), 500, id="header"),
    ],
)
def test_a_failure_is_told_and_ends_the_connection(
    at_desk: Callable[..., None], desk: Desk, outcome: Any, status: int
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        client[1].write(post(b"x"))
        await desk.answer(outcome)
        assert (await answer(client))[0] == status
        assert await client[0].read() == b""

    at_desk(test)


@pytest.mark.parametrize(("raised", "status"), [(FAILED, 507), (KeyError("a defect"), 500)])
def test_a_request_that_is_not_let_in_is_refused(
    at_desk: Callable[..., None], desk: Desk, raised: Exception, status: int
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        desk.raises = raised
        client[1].write(post(b"x"))
        assert (await answer(client))[0] == status
        assert await client[0].read() == b""

    at_desk(test)


def test_a_client_that_reads_too_slowly_waits_for_itself(
    at_desk: Callable[..., None], desk: Desk, fakes: Any
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        client[1].write(post(b"large"))
        large = Prediction(b"x" * 20_000_000)
        await desk.answer(large)
        client[1].write(post(b"next"))
        await fakes.settled()
        assert desk.queue.empty()  # it has taken the other way, and waits there
        assert await answer(client) == (200, large.body)
        assert await answer(client) == (200, b"ordinary next")

    at_desk(test)


def test_an_answer_in_pieces_is_written_as_they_come(
    at_desk: Callable[..., None], desk: Desk, fakes: Any
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        client[1].write(post(b"x"))
        stream = Stream(Prediction(b"one"))
        await desk.answer(stream)
        client[1].write(post(b"behind"))
        head = await client[0].readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked\r\n" in head
        assert await client[0].readexactly(8) == b"3\r\none\r\n"
        await fakes.settled()
        assert desk.queue.empty()
        stream.push(b"two")
        assert await client[0].readexactly(8) == b"3\r\ntwo\r\n"
        stream.end()
        assert await client[0].readexactly(5) == b"0\r\n\r\n"
        assert await answer(client) == (200, b"ordinary behind")
        assert not stream.is_open

    at_desk(test)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_may_leave_a_stream(
    at_desk: Callable[..., None], desk: Desk, fakes: Any, has_begun: bool
) -> None:
    async def test(listener: Any) -> None:
        client = await listener.connect()
        client[1].write(post(b"x"))
        request = await desk.queue.get()
        stream = Stream(Prediction(b"one"))
        if has_begun:
            request.answer(stream)
            await client[0].readuntil(b"one\r\n")
            client[1].transport.abort()
        else:
            client[1].transport.abort()
            request.answer(stream)
        await fakes.settled()
        assert not stream.is_open

    at_desk(test)


def test_shutting_down_waits_for_an_errand(
    at_desk: Callable[..., None], desk: Desk, fakes: Any
) -> None:
    async def test(listener: Any) -> None:
        loop = asyncio.get_running_loop()
        client = await listener.connect()
        client[1].write(post(b"x") + post(b"y")[:20])
        request = await desk.queue.get()
        listener.server.pre_shutdown()
        began = loop.time()
        ending = asyncio.ensure_future(listener.server.shutdown(100))
        await asyncio.sleep(50)
        assert not ending.done()
        request.answer()
        assert await answer(client) == (200, b"express x")
        assert await client[0].read() == b""
        await ending
        assert loop.time() - began == pytest.approx(50, abs=1)

    at_desk(test)


@pytest.mark.parametrize(
    "ending", ["answered", "failed", "cannot be sent", "left", "refused", "not plain"]
)
def test_nothing_is_left_for_the_garbage_collector(
    at_desk: Callable[..., None], desk: Desk, fakes: Any, ending: str
) -> None:
    """What a server collects it collects rarely, and all requests wait meanwhile."""

    async def test(listener: Any) -> None:
        client = await listener.connect()
        error = PredictionFailed("not you", status=400)
        if ending == "refused":
            desk.raises = error
        desk.is_plain = ending != "not plain"
        client[1].write(post(b"x"))
        if ending in ("refused", "not plain"):
            await answer(client)
            left = weakref.ref(error)
        else:
            request = await desk.queue.get()
            left = weakref.ref(request)
            if ending == "left":
                client[1].transport.abort()
            else:
                outcomes = {"failed": error, "cannot be sent": Prediction(b"", 7)}
                request.answer(outcomes.get(ending))
                await answer(client)
            del request
        desk.raises = None
        del error
        await fakes.settled()
        assert left() is None

    gc.collect()
    gc.disable()
    try:
        at_desk(test)
    finally:
        gc.enable()
