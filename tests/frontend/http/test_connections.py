"""Slow and many clients at a real listener, in virtual time."""

import asyncio
import contextlib
import logging

import pytest

from marserve.frontend.http.limits import ConnectionLimits
from marserve.frontend.http.request_bodies import read_body
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse, json_response
from marserve.frontend.http.router import Route

REQUEST = b"GET /quick HTTP/1.1\r\nHost: localhost\r\n\r\n"

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def quick(_request: HttpRequest) -> HttpResponse:
    return json_response({"at": "once"})


async def slow(_request: HttpRequest) -> HttpResponse:
    await asyncio.sleep(500)
    return json_response({"after": "long"})


async def length(request: HttpRequest) -> HttpResponse:
    return json_response({"bytes": len(await read_body(request, 1 << 20))})


ROUTES = {"quick": Route(quick), "slow": Route(slow), "length": Route(length)}


@pytest.fixture
def with_listener(listen):
    """Run a test that gets a function to connect; the clients leave at its end."""

    def start(test, *limits):
        listen(lambda listener: test(listener.connect), ROUTES, *limits)

    return start


async def ask(client: Client, request: bytes = REQUEST) -> bytes:
    """The status line of an answer; its body is read too."""
    reader, writer = client
    writer.write(request)
    return await answer(reader)


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    await reader.readexactly(int(fields[b"content-length"]))
    return head.split(b"\r\n")[0]


async def end_of(reader: asyncio.StreamReader) -> float:
    """The moment when the connection is closed without an answer."""
    assert await reader.read() == b""
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("sent", [b"", b"G", REQUEST[:-1]])
def test_a_connection_whose_first_head_does_not_come_is_closed(with_listener, sent):
    async def test(connect):
        began = asyncio.get_running_loop().time()
        reader, writer = await connect()
        writer.write(sent)
        assert await end_of(reader) == pytest.approx(began + 60, abs=0.5)

    with_listener(test)


def test_bytes_that_drip_do_not_extend_the_deadline_of_a_head(with_listener):
    async def test(connect):
        began = asyncio.get_running_loop().time()
        reader, writer = await connect()

        async def drip():
            for index in range(1000):
                writer.write(b"GET / HTTP/1.1\r\n" if index == 0 else b"x: y\r\n")
                await asyncio.sleep(7)

        dripping = asyncio.ensure_future(drip())
        with contextlib.suppress(ConnectionError):
            await reader.read()
        dripping.cancel()
        assert asyncio.get_running_loop().time() == pytest.approx(began + 60, abs=7.5)

    with_listener(test)


def test_a_used_connection_may_idle_but_not_begin_a_head_and_stop(with_listener):
    async def test(connect):
        client = await connect()
        for _ in range(3):
            assert await ask(client) == b"HTTP/1.1 200 OK"
            await asyncio.sleep(1000)
        client[1].write(REQUEST[:10])
        began = asyncio.get_running_loop().time()
        assert await end_of(client[0]) == pytest.approx(began + 60, abs=0.5)

    with_listener(test)


def test_a_head_may_come_in_pieces(with_listener):
    async def test(connect):
        client = await connect()
        for _ in range(3):
            for index in range(len(REQUEST) - 1):
                client[1].write(REQUEST[index : index + 1])
                await asyncio.sleep(1)
            assert await ask(client, REQUEST[-1:]) == b"HTTP/1.1 200 OK"

    with_listener(test)


@pytest.mark.parametrize("first", [False, True])
def test_the_deadline_of_a_head_does_not_apply_to_answers_and_bodies(with_listener, first):
    """Neither a slow answer nor a slow body counts."""

    async def test(connect):
        client = await connect()
        if not first:
            await ask(client)
        request = REQUEST.replace(b"quick", b"slow")
        assert await ask(client, request) == b"HTTP/1.1 200 OK"
        client[1].write(body_of(500))
        for _ in range(499):
            client[1].write(b"x")
            await asyncio.sleep(1)
        assert await ask(client, b"x") == b"HTTP/1.1 200 OK"

    with_listener(test, ConnectionLimits(body_rate=1))


def body_of(length: int) -> bytes:
    """The head of a request with a body of that length."""
    line = f"Content-Length: {length}\r\nHost".encode()
    return REQUEST.replace(b"quick", b"length").replace(b"Host", line)


@pytest.mark.parametrize(
    ("rate", "piece", "pause", "due"),
    [
        pytest.param(1000, 1, 1, 60, id="dripping"),
        pytest.param(1000, 500, 1, 120, id="too slow"),
        pytest.param(1000, 1, 59, 60, id="nearly stalling"),
        pytest.param(0, 100_000, 61, 60, id="stalling"),
        pytest.param(1, 100_000, 61, 60, id="stalling with time in hand"),
    ],
)
def test_a_body_that_comes_too_slowly_has_a_deadline(with_listener, rate, piece, pause, due):
    async def test(connect):
        loop = asyncio.get_running_loop()
        reader, writer = await connect()
        writer.write(body_of(1_000_000))
        began = loop.time()

        async def drip():
            while True:
                writer.write(b"x" * piece)
                await asyncio.sleep(pause)

        dripping = asyncio.ensure_future(drip())
        assert await answer(reader) == b"HTTP/1.1 408 Request Timeout"
        assert loop.time() == pytest.approx(began + due, abs=2)
        dripping.cancel()

    with_listener(test, ConnectionLimits(body_rate=rate))


@pytest.mark.parametrize(("rate", "piece"), [(1000, 1000), (0, 1)])
def test_a_body_that_comes_fast_enough_may_take_its_time(with_listener, rate, piece):
    async def test(connect):
        client = await connect()
        client[1].write(body_of(300 * piece))
        for _ in range(299):
            client[1].write(b"x" * piece)
            await asyncio.sleep(1)
        assert await ask(client, b"x" * piece) == b"HTTP/1.1 200 OK"

    with_listener(test, ConnectionLimits(body_rate=rate))


def test_no_more_connections_than_allowed(with_listener, caplog):
    async def test(connect):
        first, second = await connect(), await connect()
        await ask(first)
        await ask(second)
        for _ in range(2):
            third, _ = await connect()
            refusal = await third.read()
            assert refusal.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b'"message": "Too many connections."' in refusal
        assert await ask(first) == b"HTTP/1.1 200 OK"
        second[1].close()
        await asyncio.sleep(1)
        assert await ask(await connect()) == b"HTTP/1.1 200 OK"

    with caplog.at_level(logging.WARNING):
        with_listener(test, ConnectionLimits(max_connections=2))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "New connections are refused: 2 are open, as many as max_connections allows."
    ]


UPGRADES = {
    "h2c": REQUEST.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost"),
    "websocket": REQUEST.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: websocket\r\nHost"),
    "with a body": (
        b"POST /length HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
        b"Content-Length: 2\r\n\r\nab"
    ),
    "CONNECT": b"CONNECT quick:80 HTTP/1.1\r\nHost: quick\r\n\r\n",
}


@pytest.mark.parametrize("kind", UPGRADES)
@pytest.mark.parametrize("behind", [1, len(REQUEST) // 2, len(REQUEST), len(REQUEST) * 3])
def test_what_is_pipelined_behind_an_upgrade_is_answered_or_the_connection_closed(
    with_listener, kind, behind
):
    pipelined = (REQUEST * 3)[:behind]

    async def test(connect):
        reader, writer = await connect()
        writer.write(UPGRADES[kind] + pipelined)
        answers = await reader.read(100_000)
        writer.write((REQUEST * 3)[behind:] or REQUEST)
        answers += await reader.read()  # the idle connection is closed at last
        heads = [part for part in answers.split(b"\r\n\r\n") if b"HTTP/1.1 " in part]
        if b"connection: close" in answers:
            assert len(heads) == 1
        else:
            assert len(heads) == 4 + (behind == len(REQUEST) * 3)

    with_listener(test)


def test_a_connection_stays_behind_an_upgrade_that_is_not_taken(with_listener):
    """Java's client asks for h2c in its first request."""

    async def test(connect):
        client = await connect()
        for kind in ("h2c", "with a body", "websocket"):
            assert await ask(client, UPGRADES[kind]) == b"HTTP/1.1 200 OK"
        assert await ask(client) == b"HTTP/1.1 200 OK"
        client[1].write(REQUEST[:10])  # and heads have their deadline
        await end_of(client[0])

    with_listener(test)


def test_a_request_may_stop_at_every_byte(with_listener):
    request = body_of(3) + b"abc"

    async def test(connect):
        client = await connect()
        for cut in range(1, len(request)):
            client[1].write(request[:cut])
            await asyncio.sleep(2)  # longer than the fast path collects
            assert await ask(client, request[cut:]) == b"HTTP/1.1 200 OK"
            left, writer = await connect()
            writer.write(request[:cut])
            await asyncio.sleep(0)
            writer.close()
            await left.read()

    with_listener(test)
