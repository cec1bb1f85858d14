"""The fast path at a real listener, in virtual time."""

import asyncio
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import fakes
import pytest
import uvloop

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Answer as Outcome
from marserve.frontend.batching.jobs import OnAnswer, Stream
from marserve.frontend.errors import PredictionFailed
from marserve.frontend.http.http_server import HttpServer
from marserve.frontend.http.large_bodies import LargeBody
from marserve.frontend.http.limits import ConnectionLimits
from marserve.frontend.http.request_bodies import read_body
from marserve.frontend.http.requests import HttpRequest, PlainRequest
from marserve.frontend.http.responses import HttpResponse
from marserve.frontend.http.router import Route, Router, Submit
from marserve.frontend.security.guard import Guard
from marserve.frontend.telemetry.access_log import AccessLog
from marserve.frontend.telemetry.metrics import Metrics

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def post(body: bytes, path: str = "model", *headers: str) -> bytes:
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
    """A request that was queued at the `Model`, and its ticket."""

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
            on_answer(outcome or Prediction(b"fast " + self.body))


class Model:
    """Queues what comes on the fast path; answers at once what aiohttp has read.

    Attributes:
        queue: Requests that are not answered yet.
        raises: An error with which requests are refused.
        defect: An error that is raised for a head.
        is_plain: Whether the route accepts requests on the fast path.
    """

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Request] = asyncio.Queue()
        self.raises: Exception | None = None
        self.defect: Exception | None = None
        self.is_plain = True
        self.routes = {
            "model": Route(self._serve, accept=self._accept),
            "other": Route(self._serve),
        }

    def _accept(self, _request: PlainRequest) -> Submit | None:
        if self.defect is not None:
            raise self.defect
        return self._submit if self.is_plain else None

    def _submit(self, body: bytes, on_answer: OnAnswer) -> Request:
        if self.raises is not None:
            raise self.raises
        queued = Request(body, on_answer)
        self.queue.put_nowait(queued)
        return queued

    async def _serve(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, b"ordinary " + await read_body(request, 1 << 20))

    async def answer(self, outcome: Outcome | None = None) -> None:
        """Answer the next request."""
        (await self.queue.get()).answer(outcome)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def with_model(listen, model):
    """Run a test that gets the listener with the model behind it."""
    return lambda test: listen(test, model.routes)


def test_a_plain_request_is_queued_and_answered_without_a_task(with_model, model):
    async def test(listener):
        client = await listener.connect()
        for body in (b"a", b"", b"b" * 10_000):
            client[1].write(post(body))
            request = await model.queue.get()
            tasks = len(asyncio.all_tasks())
            request.answer()
            assert len(asyncio.all_tasks()) == tasks
            assert await answer(client) == (200, b"fast " + body)

    with_model(test)


@pytest.mark.parametrize(
    "special",
    [
        pytest.param(post(b"x").replace(b"1.1", b"1.0"), id="HTTP/1.0"),
        pytest.param(post(b"x", "model", "Connection: close"), id="close"),
        pytest.param(post(b"x", "other"), id="a route without it"),
        pytest.param(
            post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            + b"1\r\nx\r\n0\r\n\r\n",
            id="chunked",
        ),
        pytest.param(post(b"x", "model", "Connection: upgrade", "Upgrade: x"), id="upgrade"),
    ],
)
def test_a_special_request_is_left_to_aiohttp(with_model, model, special):
    async def test(listener):
        client = await listener.connect()
        client[1].write(special)
        assert await answer(client) == (200, b"ordinary x")
        assert model.queue.empty()

    with_model(test)


def test_a_connection_stays_with_aiohttp_once_handed_over(with_model, model):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"plain"))
        await model.answer()
        assert await answer(client) == (200, b"fast plain")
        model.is_plain = False
        client[1].write(post(b"form"))
        assert await answer(client) == (200, b"ordinary form")
        model.is_plain = True
        client[1].write(post(b"plain"))
        assert await answer(client) == (200, b"ordinary plain")

    with_model(test)


def _behind() -> list[Any]:
    """Pieces that come while a request is under way, and what is answered to them."""
    a, b = post(b"a"), post(b"b", "other")
    both = [b"a", b"b"]
    return [
        pytest.param([a, b], both, id="one after the other"),
        pytest.param([b + a], both[::-1], id="in one piece"),
        pytest.param([(a + b)[at : at + 7] for at in range(0, len(a + b), 7)], both, id="torn"),
        pytest.param([post(b"x" * 100)[:-1], b"x"], [b"x" * 100], id="slow body"),
        pytest.param([a * 100], both[:1] * 100, id="a hundred"),
    ]


@pytest.mark.parametrize("is_answered_first", [False, True])
@pytest.mark.parametrize(("pieces", "bodies"), _behind())
def test_answers_go_out_in_the_order_of_requests(
    with_model, model, pieces, bodies, is_answered_first
):
    async def answer_all():
        while True:
            await model.answer()

    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"first"))
        first = await model.queue.get()
        if is_answered_first:
            first.answer()
        for piece in pieces:
            client[1].write(piece)
            await fakes.drain_loop()
        first.answer()
        answering = asyncio.ensure_future(answer_all())
        assert await answer(client) == (200, b"fast first")
        for body in bodies:
            assert (await answer(client))[1].split()[1] == body
        client[1].write(post(b"last"))
        assert (await answer(client))[1].split()[1] == b"last"
        answering.cancel()

    with_model(test)


def test_a_request_that_takes_long_to_come_is_left_to_aiohttp(with_model, model):
    async def test(listener):
        client = await listener.connect()
        for size in (100, 1):
            client[1].write(post(b"x" * 100)[:-size])
            await asyncio.sleep(0.5)
            client[1].write(b"x" * size)
            await model.answer()
            assert await answer(client) == (200, b"fast " + b"x" * 100)
        client[1].write(post(b"x" * 100)[:-10])
        for _ in range(10):
            await asyncio.sleep(5)
            client[1].write(b"x")
        assert await answer(client) == (200, b"ordinary " + b"x" * 100)
        assert model.queue.empty()

    with_model(test)


def test_what_is_not_http_is_refused_after_the_last_answer(with_model, model):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"first"))
        first = await model.queue.get()
        client[1].write(b"\0\0\0\r\n\r\n")
        await fakes.drain_loop()
        first.answer()
        assert await answer(client) == (200, b"fast first")
        assert (await answer(client))[0] == 400
        assert await client[0].read() == b""

    with_model(test)


def test_a_client_cannot_fill_the_memory_behind_a_request(with_model, model):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"first"))
        await model.queue.get()
        count = 200_000
        client[1].write(post(b"x" * 100) * count)
        for _ in range(20):
            await fakes.drain_loop()
        assert client[1].transport.get_write_buffer_size() > count * 50

    with_model(test)


def test_the_deadline_of_a_head_does_not_apply_while_busy_or_idle(with_model, model):
    async def test(listener):
        client = await listener.connect()
        for _ in range(2):
            client[1].write(post(b"x"))
            await asyncio.sleep(10_000)
            await model.answer()
            assert await answer(client) == (200, b"fast x")
            await asyncio.sleep(1000)

    with_model(test)


@pytest.mark.parametrize("seconds", [0, 30, 100])
def test_a_head_that_stops_has_a_deadline_but_the_answer_comes_first(with_model, model, seconds):
    async def test(listener):
        loop = asyncio.get_running_loop()
        client = await listener.connect()
        client[1].write(post(b"x"))
        request = await model.queue.get()
        if not seconds:
            request.answer()
        client[1].write(post(b"y")[:10])
        began = loop.time()
        await asyncio.sleep(seconds)
        if seconds:
            request.answer()
        assert await answer(client) == (200, b"fast x")
        assert await client[0].read() == b""
        due = 60 if seconds < 60 else 120
        assert loop.time() - began == pytest.approx(due, abs=1)

    with_model(test)


def test_a_connection_that_is_not_used_any_more_ends(with_model, model):
    async def test(listener):
        loop = asyncio.get_running_loop()
        client = await listener.connect()
        client[1].write(post(b"x"))
        await asyncio.sleep(10_000)  # longer than a connection may idle
        await model.answer()
        assert await answer(client) == (200, b"fast x")
        began = loop.time()
        assert await client[0].read() == b""
        assert loop.time() - began == pytest.approx(3630, abs=1)

    with_model(test)


def leave(writer: asyncio.StreamWriter, ends: str) -> None:
    if ends == "half-close":
        writer.write_eof()
    elif ends == "abort":
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.parametrize("ends", ["close", "abort", "half-close"])
def test_the_request_of_a_client_that_leaves_is_cancelled(with_model, model, ends):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"x"))
        request = await model.queue.get()
        client[1].write(post(b"y")[:20])
        leave(client[1], ends)
        await fakes.drain_loop()
        assert request.is_cancelled

    with_model(test)


@pytest.mark.parametrize("ends", ["close", "abort", "half-close"])
@pytest.mark.parametrize("pipelined", [1, 700])
def test_a_client_may_leave_while_it_is_not_read_any_more(with_model, model, ends, pipelined):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"x"))
        request = await model.queue.get()
        client[1].write(post(b"y" * 100) * pipelined)
        await asyncio.sleep(5)
        leave(client[1], ends)
        await asyncio.sleep(5)
        assert request.is_cancelled

    with_model(test)


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
def test_a_failure_is_sent_and_ends_the_connection(with_model, model, outcome, status):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"x"))
        await model.answer(outcome)
        assert (await answer(client))[0] == status
        assert await client[0].read() == b""

    with_model(test)


@pytest.mark.parametrize("first_bytes", [0, 20])
@pytest.mark.parametrize(("defect", "status"), [(KeyError("a defect"), 500), (MemoryError(), 507)])
def test_a_defect_while_a_request_is_read_is_answered(
    with_model, model, caplog, defect, status, first_bytes
):
    async def test(listener):
        for is_behind in (False, True):
            client = await listener.connect()
            model.defect = None
            if is_behind:  # the defect comes when the next request is read
                client[1].write(post(b"first"))
                first = await model.queue.get()
            model.defect = defect
            client[1].write(post(b"x")[:first_bytes])
            await asyncio.sleep(0.1)
            client[1].write(post(b"x")[first_bytes:])
            await asyncio.sleep(0.1)
            if is_behind:
                first.answer()
                assert await answer(client) == (200, b"fast first")
            assert (await answer(client))[0] == status
            assert await client[0].read() == b""
            assert [record.message for record in caplog.records if record.exc_info] == [
                f"Cannot answer 127.0.0.1:{client[1].get_extra_info('sockname')[1]}"
            ]
            caplog.clear()

    with_model(test)


@pytest.mark.parametrize(("raised", "status"), [(FAILED, 507), (KeyError("a defect"), 500)])
def test_a_request_that_is_not_admitted_is_refused(with_model, model, raised, status):
    async def test(listener):
        client = await listener.connect()
        model.raises = raised
        client[1].write(post(b"x"))
        assert (await answer(client))[0] == status
        assert await client[0].read() == b""

    with_model(test)


def test_no_request_is_admitted_while_answers_fill_the_memory(listen, model):
    async def test(listener):
        usage = listener.server.usage
        slow_reader = usage.client("192.0.2.1")
        usage.add(slow_reader, 101)
        status, body = await answer(await ask(listener))
        assert (status, b"max_bytes_in_flight allows no more" in body) == (503, True)
        assert model.queue.empty()
        usage.add(slow_reader, -101)
        client = await ask(listener)
        (await model.queue.get()).answer()
        assert await answer(client) == (200, b"fast x")
        assert usage.bytes == 0

    async def ask(listener):
        client = await listener.connect()
        client[1].write(post(b"x"))
        return client

    listen(test, model.routes, ConnectionLimits(max_bytes_in_flight=100))


# There, `writelines` of asyncio's own loop never pauses a protocol. The server runs on uvloop.
pauses_for_slow_clients = pytest.mark.skipif(
    sys.version_info[:2] in {(3, 12), (3, 13)}, reason="asyncio does not pause"
)


@pauses_for_slow_clients
def test_no_request_is_begun_until_a_slow_client_has_read_its_answer(with_model, model):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"large"))
        large = Prediction(b"x" * 20_000_000)
        await model.answer(large)
        client[1].write(post(b"next"))
        await fakes.drain_loop()
        assert model.queue.empty()
        assert await answer(client) == (200, large.body)
        await model.answer()
        assert await answer(client) == (200, b"fast next")

    with_model(test)


@pauses_for_slow_clients
def test_requests_of_a_slow_client_that_has_left_are_not_served(with_model, model):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"large"))
        await model.answer(Prediction(b"x" * 20_000_000))
        client[1].write(post(b"next"))
        await fakes.drain_loop()
        client[1].transport.abort()
        await fakes.drain_loop()
        assert model.queue.empty()

    with_model(test)


def test_an_answer_in_pieces_is_written_as_they_come(with_model, model):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"x"))
        stream = Stream(Prediction(b"one"))
        await model.answer(stream)
        client[1].write(post(b"behind"))
        head = await client[0].readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked\r\n" in head
        assert await client[0].readexactly(8) == b"3\r\none\r\n"
        await fakes.drain_loop()
        assert model.queue.empty()
        stream.push(b"two")
        assert await client[0].readexactly(8) == b"3\r\ntwo\r\n"
        stream.end()
        assert await client[0].readexactly(5) == b"0\r\n\r\n"
        await model.answer()
        assert await answer(client) == (200, b"fast behind")
        assert not stream.is_open

    with_model(test)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_stream_is_closed_when_its_client_leaves(with_model, model, has_begun):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(b"x"))
        request = await model.queue.get()
        stream = Stream(Prediction(b"one"))
        if has_begun:
            request.answer(stream)
            await client[0].readuntil(b"one\r\n")
            client[1].transport.abort()
        else:
            client[1].transport.abort()
            request.answer(stream)
        await fakes.drain_loop()
        assert not stream.is_open

    with_model(test)


def test_shutting_down_waits_for_a_request(with_model, model):
    async def test(listener):
        loop = asyncio.get_running_loop()
        client = await listener.connect()
        idle = await listener.connect()
        client[1].write(post(b"x"))
        request = await model.queue.get()
        client[1].write(post(b"y")[:20])
        began = loop.time()
        ending = asyncio.ensure_future(listener.server.close(100))
        assert await idle[0].read() == b""
        await asyncio.sleep(50)
        assert not ending.done()
        request.answer()
        assert await answer(client) == (200, b"fast x")
        assert await client[0].read() == b""
        await ending
        assert loop.time() - began == pytest.approx(50, abs=1)

    with_model(test)


@pytest.mark.parametrize(
    "ending", ["answered", "failed", "cannot be sent", "left", "refused", "not plain"]
)
@pytest.mark.parametrize("size", [1, 600_000])
def test_nothing_is_left_for_the_garbage_collector(with_model, model, ending, size):
    """What a server collects it collects rarely, and all requests wait meanwhile."""

    async def test(listener):
        client = await listener.connect()
        error = PredictionFailed("not you", status=400)
        if ending == "refused":
            model.raises = error
        model.is_plain = ending != "not plain"
        client[1].write(post(b"x" * size))
        if ending in ("refused", "not plain"):
            await answer(client)
            left = weakref.ref(error)
        else:
            request = await model.queue.get()
            left = weakref.ref(request)
            if ending == "left":
                client[1].transport.abort()
            else:
                outcomes = {"failed": error, "cannot be sent": Prediction(b"", 7)}
                request.answer(outcomes.get(ending))
                await answer(client)
            del request
        model.raises = None
        del error
        await fakes.drain_loop()
        assert left() is None

    gc.collect()
    gc.disable()
    try:
        with_model(test)
    finally:
        gc.enable()


# -- large bodies, which are received in place ----------------------------------------------------

LARGE = bytes(range(256)) * 3000


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError


async def send_slowly(client: Client, data: bytes, seconds: float, size: int) -> None:
    for at in range(0, len(data), size):
        client[1].write(data[at : at + size])
        await asyncio.sleep(seconds)


def test_a_large_body_is_received_into_the_memory_where_it_stays(with_model, model):
    async def test(listener):
        client = await listener.connect()
        await send_slowly(client, post(LARGE), 0.01, 50_000)
        request = await model.queue.get()
        assert type(request.body) is bytearray
        assert request.body == LARGE
        assert listener.server.usage.bytes >= len(LARGE)
        request.answer(Prediction(b"read"))
        assert await answer(client) == (200, b"read")
        assert listener.server.usage.bytes == 0
        client[1].write(post(b"next"))
        await model.answer()
        assert await answer(client) == (200, b"fast next")

    with_model(test)


def test_a_slow_head_of_a_large_body_does_not_affect_the_next_request(with_model, model):
    async def test(listener):
        client = await listener.connect()
        request = post(LARGE)
        client[1].write(request[:10])
        await asyncio.sleep(0.5)
        client[1].write(request[10:100_000])
        await fakes.drain_loop()
        client[1].write(request[100_000:])
        await model.answer(Prediction(b"read"))
        assert await answer(client) == (200, b"read")
        client[1].write(post(b"next"))
        await asyncio.sleep(2)
        await model.answer()
        assert await answer(client) == (200, b"fast next")

    with_model(test)


def test_a_large_body_may_take_as_long_as_its_rate_allows(listen, model):
    async def test(listener):
        client = await listener.connect()
        await send_slowly(client, post(LARGE), 9.0, 10_000)
        await model.answer(Prediction(b"read"))
        assert await answer(client) == (200, b"read")

    listen(test, model.routes, ConnectionLimits(body_timeout=10.0, body_rate=1000))


@pytest.mark.parametrize(
    ("seconds", "limits"),
    [
        pytest.param(11.0, ConnectionLimits(body_timeout=10.0), id="a pause"),
        pytest.param(9.0, ConnectionLimits(body_timeout=10.0, body_rate=2000), id="too slow"),
    ],
)
def test_a_large_body_that_is_late_is_refused(listen, model, seconds, limits):
    async def test(listener):
        client = await listener.connect()
        sending = asyncio.ensure_future(send_slowly(client, post(LARGE), seconds, 10_000))
        status, body = await answer(client)
        assert (status, b"did not arrive in time" in body) == (408, True)
        assert await client[0].read() == b""
        sending.cancel()
        assert model.queue.empty()
        assert listener.server.usage.bytes == 0

    listen(test, model.routes, limits)


def test_memory_of_a_large_body_follows_what_has_arrived(with_model, model):
    async def test(listener):
        client, usage = await listener.connect(), listener.server.usage
        head = b"POST /model HTTP/1.1\r\nHost: h\r\nContent-Length: 100000000\r\n\r\n"
        client[1].write(head)
        await fakes.drain_loop()
        assert usage.bytes <= 65_536
        client[1].write(b"x" * 70_000)
        await fakes.drain_loop()
        assert 70_000 <= usage.bytes <= 32 * 70_000
        client[1].transport.abort()
        await fakes.drain_loop()
        assert usage.bytes == 0
        assert model.queue.empty()

    with_model(test)


@pytest.mark.parametrize("allowed", [50_000, 300_000, 767_000])
def test_a_large_body_that_exceeds_the_bytes_in_flight_is_refused(listen, model, allowed):
    async def test(listener):
        client = await listener.connect()
        sending = asyncio.ensure_future(send_slowly(client, post(LARGE), 0.01, 20_000))
        status, body = await answer(client)
        assert (status, b"more memory than max_bytes_in_flight" in body) == (413, True)
        sending.cancel()
        assert model.queue.empty()

    listen(test, model.routes, ConnectionLimits(max_bytes_in_flight=allowed))


@pytest.mark.parametrize("ends", ["half-close", "abort"])
def test_a_client_that_leaves_in_the_middle_of_a_large_body_is_forgotten(with_model, model, ends):
    async def test(listener):
        client = await listener.connect()
        client[1].write(post(LARGE)[:-1])
        await fakes.drain_loop()
        if ends == "half-close":
            client[1].write_eof()
            assert await client[0].read() == b""
        else:
            client[1].transport.abort()
        await fakes.drain_loop()
        assert listener.server.usage.bytes == 0
        assert model.queue.empty()

    with_model(test)


@pytest.mark.parametrize("ending", ["answered", "left", "left to aiohttp"])
@pytest.mark.parametrize("uses_uvloop", [True, False])
def test_the_memory_of_a_large_body_is_given_back_at_once(model, uses_uvloop, ending):
    """Not by the garbage collector, and while the connection stays open."""

    async def test():
        loop = asyncio.get_running_loop()
        router = Router(
            model.routes, guard=Guard(None), access_log=AccessLog(loop, Metrics("h")),
            common_headers="",
        )  # fmt: skip
        limit = 500_000 if ending == "left to aiohttp" else 0
        server = HttpServer(router, ConnectionLimits(max_bytes_in_flight=limit))
        listener = await loop.create_server(server, "127.0.0.1", 0)
        client = await asyncio.open_connection(*listener.sockets[0].getsockname())
        try:
            await exchange(server, client)
            await fakes.drain_loop()
            assert all(len(memory) < len(LARGE) // 2 for memory in memories())
        finally:
            client[1].transport.abort()
            listener.close()
            await server.close(0.5)

    async def exchange(server, client):
        client[1].write(post(LARGE)[:-1])
        if ending == "left to aiohttp":
            assert (await answer(client))[0] == 413
            return
        await until(lambda: server.usage.bytes >= len(LARGE))
        if ending == "answered":
            client[1].write(LARGE[-1:])
            await model.answer(Prediction(b"read"))
            assert await answer(client) == (200, b"read")
        else:
            client[1].transport.abort()
            await until(lambda: server.usage.bytes == 0)

    def memories():
        found = [each for each in gc.get_objects() if isinstance(each, LargeBody)]
        return [body._memory for body in found]

    gc.collect()
    gc.disable()
    try:
        (uvloop.run if uses_uvloop else asyncio.run)(test())
    finally:
        gc.enable()


def test_a_client_that_waits_for_100_before_a_large_body_gets_it(with_model, model):
    async def test(listener):
        client = await listener.connect()
        request = post(LARGE, "model", "Expect: 100-continue")
        client[1].write(request[: -len(LARGE)])
        assert await client[0].readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client[1].write(LARGE)
        await model.answer(Prediction(b"read"))
        assert await answer(client) == (200, b"read")

    with_model(test)
