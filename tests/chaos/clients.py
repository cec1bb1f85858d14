"""Clients that keep asking, and judge what they get."""

import asyncio
import time
from collections.abc import Sequence
from random import Random

from chaos.http_client import Connection, Lost, chunked_bytes, form_bytes, request_bytes
from chaos.rules import (
    ANSWER_SECONDS,
    CRASHING_REQUEST,
    FAILING_REQUEST,
    FRONTEND_DOWN,
    FRONTEND_STOPPED,
    NO_DESCRIPTORS,
    Outcome,
)
from chaos.served import CRASHES, Request, Served, make_request
from chaos.world import World, pick

#: Seconds in which /ping is answered, whatever goes on: a busy machine takes its time, too.
PING_SECONDS = 5.0
_PING_PAUSE = 0.1
_THINK = 0.08  # seconds at most between two requests of a client
_BAD_SHARE = 0.02
_HARMLESS = ("raise", "refuse", "memory", "flood", "break")


def plain_bytes(request: Request) -> bytes:
    """A request in its plainest form."""
    return request_bytes("POST", request.path, request.body)


async def exchange(
    world: World, connection: Connection, requests: Sequence[Request], data: bytes
) -> bool:
    """Send requests, wait for their answers in order, have them judged.

    Those that come after one whose answer ends the connection were not accepted.

    Returns:
        Whether all were answered with 200.
    """
    is_good = True
    since, is_new = time.monotonic(), not connection.has_answered
    connection.send(data)
    for request in requests:
        lost = ""
        try:
            answer = await connection.answer(ANSWER_SECONDS)
        except Lost as error:
            answer = None
            lost = f"broken off {error}" if "status 200" in str(error) else "connection lost"
        except TimeoutError:
            answer, lost = None, "late"
            connection.close()
        outcome = Outcome(since, time.monotonic(), answer, lost, on_new_connection=is_new)
        world.referee.outcome(request, outcome)
        if answer is not None and answer.headers.get("connection") == "close":
            connection.close()
            return False
        is_good = is_good and answer is not None and answer.status == 200
    return is_good


async def exchange_bad(world: World, request: Request, connection: Connection) -> None:
    """Send a request that asks for a failure; others may feel it as long as it is under way."""
    is_crash = request.misdeed in CRASHES
    kind = CRASHING_REQUEST if is_crash else FAILING_REQUEST
    with world.timeline.fault(kind, request.model.name):
        await exchange(world, connection, [request], plain_bytes(request))


async def open_connection(world: World, listener: str = "inference") -> Connection | None:
    """A connection to a listener; None where there may be none."""
    try:
        return await Connection.open(world.server.ports[listener])
    except OSError as error:
        if not world.felt(FRONTEND_DOWN, NO_DESCRIPTORS):
            world.referee.violation(f"connecting: {error}")
        await asyncio.sleep(0.05)
        return None


async def keep_asking(world: World, model: Served, rng: Random) -> None:
    """A client of one model, until it is over."""
    connection: Connection | None = None
    try:
        while not world.over.is_set():
            if connection is None or connection.is_closed:
                connection = await open_connection(world)
                continue
            await _ask_once(world, connection, model, rng)
            await asyncio.sleep(rng.uniform(0, _THINK))
            if connection.has_unasked_answer:
                world.referee.violation(f"{model.name}: an answer that nobody asked for")
                connection.close()
    finally:
        if connection is not None:
            connection.close()


async def _ask_once(world: World, connection: Connection, model: Served, rng: Random) -> None:
    token = world.token(model.name)
    if rng.random() < _BAD_SHARE and not world.is_calm:
        misdeeds = [each for each in _HARMLESS if each in model.misdeeds]
        request = make_request(model, token, rng, do=pick(rng, misdeeds))
        await exchange_bad(world, request, connection)
        return
    form = rng.random()
    if model.form == "sequence" and form < 0.5:
        await _ask_in_sequence(world, connection, model, rng)
        return
    if form < 0.1:
        requests = [make_request(model, world.token(model.name), rng) for _ in range(3)]
        data = b"".join(map(plain_bytes, requests))
    else:
        requests = [make_request(model, token, rng)]
        data = _encoded(requests[0], form)
    await exchange(world, connection, requests, data)


async def _ask_in_sequence(
    world: World, connection: Connection, model: Served, rng: Random
) -> None:
    """Some requests of one sequence; a failure ends it, for nobody can say what is done of it."""
    id_, last = world.token("sequence"), rng.randint(1, 8)
    for step in range(1, last + 1):
        request = make_request(model, world.token(model.name), rng, step=step)
        flag = f"\r\nts_request_sequence_end: {str(step == last).lower()}"
        headers = f"Content-Type: application/json\r\nts_request_sequence_id: {id_}{flag}"
        data = request_bytes("POST", request.path, request.body, headers)
        if connection.is_closed or not await exchange(world, connection, [request], data):
            return
        await asyncio.sleep(rng.uniform(0, _THINK))


def _encoded(request: Request, form: float) -> bytes:
    if form < 0.2:
        return chunked_bytes(request.path, request.body)
    if form < 0.3 and request.model.is_plain:
        return form_bytes(request.path, request.body)
    return plain_bytes(request)


async def keep_pinging(world: World) -> None:
    """Ask /ping on one connection, until it is over: the event loop must never be held up."""
    connection: Connection | None = None
    while not world.over.is_set():
        if connection is None or connection.is_closed:
            connection = await open_connection(world)
            continue
        since = time.monotonic()
        connection.send(request_bytes("GET", "/ping"))
        try:
            await connection.answer(ANSWER_SECONDS)
        except (Lost, TimeoutError) as error:
            connection.close()
            excuses = [FRONTEND_DOWN, NO_DESCRIPTORS]
            if not connection.has_answered:
                excuses.append(FRONTEND_STOPPED)  # see `rules`
            if not world.felt(*excuses, since=since):
                world.referee.violation(f"/ping: {type(error).__name__} {error}")
            continue
        until = time.monotonic()
        took = until - since - world.timeline.seconds(FRONTEND_STOPPED, since, until)
        world.referee.slowest["/ping"] = max(world.referee.slowest["/ping"], took)
        if took > PING_SECONDS:
            world.referee.violation(f"/ping took {took:.2f} s")
        await asyncio.sleep(_PING_PAUSE)
    if connection is not None:
        connection.close()
