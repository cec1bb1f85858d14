"""Clients dawdle, leave, cut requests short, send nonsense, or come in crowds."""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from random import Random

import psutil

from chaos.actions.action import action
from chaos.clients import exchange, open_connection, plain_bytes
from chaos.http_client import Connection, Lost, form_bytes, request_bytes
from chaos.operators import scrape
from chaos.rules import ANSWER_SECONDS, FRONTEND_DOWN, FRONTEND_STOPPED, NO_DESCRIPTORS
from chaos.served import ENGINE, RESPONSE_SECONDS, flood_request, make_request
from chaos.world import World, pick

#: What the server is configured with, and how much longer a client may be held.
HEAD_SECONDS = 2
BODY_SECONDS = 2
# The frontend itself may be stopped meanwhile; and a busy machine takes its time.
_MARGIN = 2 * RESPONSE_SECONDS + 4.0
#: Streams of 40 MB each, those of them that are read in the end, and how much of all may be kept.
_UNREAD_STREAMS, _LATE_STREAMS = 12, 2
_UNREAD_BYTES = 200 << 20


async def _dawdle(world: World, data: bytes, pause: float, seconds: float, what: str) -> str:
    """Send bytes one by one; the server must hang up, or answer, in time."""
    connection = await open_connection(world)
    if connection is None:
        return "not connected"
    since = time.monotonic()
    try:
        for place in range(len(data)):
            if connection.is_closed or time.monotonic() - since > seconds:
                break
            connection.send(data[place : place + 1])
            await asyncio.sleep(pause)
        try:
            answer = await connection.answer(seconds - (time.monotonic() - since) + 0.1)
            return f"{answer.status} after {time.monotonic() - since:.1f} s"
        except Lost:
            return f"closed after {time.monotonic() - since:.1f} s"
        except TimeoutError:
            if not world.felt(NO_DESCRIPTORS, FRONTEND_DOWN, since=since):
                world.referee.violation(f"{what} is still served after {seconds} s")
            return "never closed"
    finally:
        connection.close()


@action()
async def slow_head(world: World, rng: Random) -> str:
    """A head that never ends."""
    head = b"POST /predictions/single HTTP/1.1\r\nHost: a\r\n" + b"X-A: b\r\n" * 100
    seconds = HEAD_SECONDS + _MARGIN
    return await _dawdle(world, head, rng.uniform(0.05, 0.3), seconds, "a head that never ends")


@action()
async def slow_body(world: World, rng: Random) -> str:
    """A body that comes byte by byte."""
    body = b'{"token": "slow"' + b" " * 900
    data = request_bytes("POST", "/predictions/single", body)[: -len(body)]
    seconds = BODY_SECONDS + 1 + _MARGIN
    return await _dawdle(world, data + body, rng.uniform(0.05, 0.3), seconds, "a slow body")


@action()
async def slow_reader(world: World, rng: Random) -> str:
    """A client that reads its long answer after a while."""
    connection = await open_connection(world)
    if connection is None:
        return "not connected"
    model, seconds = pick(rng, world.models[:4]), rng.uniform(0.5, 3)
    request = make_request(model, world.token("slow"), rng, repeat=50_000)
    try:
        connection.pause_reading()
        asyncio.get_running_loop().call_later(seconds, connection.resume_reading)
        await exchange(world, connection, [request], plain_bytes(request))
    finally:
        connection.close()
    return f"{len(request.expected)} bytes of {model.name} after {seconds:.1f} s"


@action()
async def unread_streams(world: World, rng: Random) -> str:
    """Clients read long streams of an engine late, or not at all: the server does not keep them."""
    request, seconds = flood_request(ENGINE), rng.uniform(1, 3)
    workers = (await world.describe(ENGINE.name) or {"workers": ()})["workers"]
    pids = [world.pid, *(each["pid"] for each in workers if each["status"] == "READY")]
    before, opened = _memory(pids), list[Connection]()
    try:
        await _open_unread(world, opened, _UNREAD_STREAMS, plain_bytes(request))
        late = opened[:_LATE_STREAMS]
        reading = asyncio.gather(*(exchange(world, each, [request], b"") for each in late))
        await asyncio.sleep(seconds)
        grown = _memory(pids) - before
        if grown > _UNREAD_BYTES:
            world.referee.violation(f"unread streams take {grown >> 20} MiB")
        for connection in late:
            connection.resume_reading()
        await reading
    finally:
        for connection in opened:
            connection.close()
    return f"{grown >> 20} MiB for {len(opened)} streams after {seconds:.1f} s"


@action()
async def scrapes_in_a_burst(world: World, rng: Random) -> str:
    """Many scrapes at once, most of which are never read."""
    count, unread = rng.randint(5, 20), list[Connection]()
    try:
        await _open_unread(world, unread, count, request_bytes("GET", "/metrics") * 2, "metrics")
        await asyncio.gather(*(scrape(world, rng, {}) for _ in range(count // 5)))
    finally:
        for connection in unread:
            connection.close()
    return f"{len(unread)} unread, {count // 5} read"


async def _open_unread(
    world: World, opened: list[Connection], count: int, data: bytes, listener: str = "inference"
) -> None:
    """Open so many connections, whose answers are not read for now."""
    for _ in range(count):
        connection = await open_connection(world, listener)
        if connection is not None:
            opened.append(connection)
            connection.pause_reading()
            connection.send(data)


def _memory(pids: Iterable[int]) -> int:
    """Bytes of those that still are there, without what they share."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().uss
    return total


@action(weight=2)
async def leave_early(world: World, rng: Random) -> str:
    """Clients leave while their requests are under way."""
    model, count = pick(rng, world.models), rng.randint(1, 20)

    async def leave(patience: float) -> None:
        connection = await open_connection(world)
        if connection is not None:
            request = make_request(model, world.token("left"), rng, ms=20)
            connection.send(plain_bytes(request))
            await asyncio.sleep(patience)
            connection.close()

    await asyncio.gather(*(leave(rng.uniform(0, 0.05)) for _ in range(count)))
    return f"{count} of {model.name}"


@action()
async def half_requests(world: World, rng: Random) -> str:
    """Requests are cut off anywhere."""
    model, count = pick(rng, world.models), rng.randint(1, 20)
    for _ in range(count):
        connection = await open_connection(world)
        if connection is not None:
            data = plain_bytes(make_request(model, world.token("half"), rng))
            connection.send(data[: rng.randrange(1, len(data))])
            await asyncio.sleep(0.01)
            connection.close()
    return f"{count} of {model.name}"


@action()
async def pipelined_burst(world: World, rng: Random) -> str:
    """Many requests on one connection before the first answer."""
    model, count = pick(rng, world.models), rng.randint(10, 40)
    connection = await open_connection(world)
    if connection is None:
        return "not connected"
    try:
        requests = [make_request(model, world.token("piped"), rng) for _ in range(count)]
        data = b"".join(map(plain_bytes, requests))
        await exchange(world, connection, requests, data)
    finally:
        connection.close()
    return f"{count} of {model.name}"


@action()
async def behind_an_upgrade(world: World, rng: Random) -> str:
    """A request follows one that offers HTTP/2: it must not get the other's answer."""
    model = pick(rng, world.models)
    connection = await open_connection(world)
    if connection is None:
        return "not connected"
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ"
    try:
        first, second = (make_request(model, world.token("h2c"), rng) for _ in range(2))
        headers = f"Content-Type: application/json\r\n{offer}"
        data = request_bytes("POST", first.path, first.body, headers) + plain_bytes(second)
        await exchange(world, connection, [first, second], data)
    finally:
        connection.close()
    return model.name


@action()
async def nonsense(world: World, rng: Random) -> str:
    """What is no HTTP, or hardly."""
    count = rng.randint(1, 10)
    for _ in range(count):
        connection = await open_connection(world)
        if connection is not None:
            head = pick(rng, (b"", b"POST / HTTP/1.1\r\n", b"GET /predictions/", b"\x16\x03\x01"))
            connection.send(head + rng.randbytes(200) + b"\r\n\r\n")
            await asyncio.sleep(0.02)
            connection.close()
    return str(count)


@action()
async def large_form(world: World, rng: Random) -> str:
    """A form of tens to thousands of fields: answered or refused; /ping does not wait for it."""
    fields = int(10 ** rng.uniform(1, 4.3))
    request = make_request(world.models[0], world.token("form"), rng)
    connection = await open_connection(world)
    if connection is None:
        return "not connected"
    since = time.monotonic()
    try:
        connection.send(form_bytes(request.path, request.body, fields))
        answer = await connection.answer(ANSWER_SECONDS)
    except (Lost, TimeoutError) as error:
        if not world.felt(FRONTEND_DOWN, FRONTEND_STOPPED, NO_DESCRIPTORS, since=since):
            world.referee.violation(f"a form of {fields} fields: {type(error).__name__} {error}")
        return "lost"
    finally:
        connection.close()
    if answer.status == 200 and answer.text != request.expected:
        world.referee.violation(f"a form of {fields} fields: another payload")
    return f"{fields} fields: {answer.status}"


@action()
async def crowd(world: World, rng: Random) -> str:
    """Connections that say nothing."""
    count = rng.randint(50, 200)
    opened: list[Connection] = []
    try:
        for _ in range(count):
            connection = await open_connection(world)
            if connection is not None:
                opened.append(connection)
        await asyncio.sleep(rng.uniform(0, 2))
    finally:
        for connection in opened:
            connection.close()
    return str(count)
