"""Handlers raise, hang, exit, or poison their process; engines fail."""

import asyncio
from pathlib import Path
from random import Random

from chaos.actions.action import action
from chaos.clients import exchange_bad, open_connection
from chaos.operators import scrape
from chaos.rules import FAILING_REQUEST
from chaos.served import ENGINE, Served, make_request
from chaos.world import World, pick


async def send_bad(world: World, model: Served, rng: Random, misdeed: str) -> None:
    """One request that asks for a failure, on a connection of its own."""
    connection = await open_connection(world)
    if connection is None:
        return
    try:
        request = make_request(model, world.token("bad"), rng, do=misdeed)
        await exchange_bad(world, request, connection)
    finally:
        connection.close()


async def _one(world: World, rng: Random, misdeed: str) -> str:
    model = pick(rng, [model for model in world.models if misdeed in model.misdeeds])
    await send_bad(world, model, rng, misdeed)
    return model.name


@action(weight=2)
async def handler_exits(world: World, rng: Random) -> str:
    """A request ends its worker."""
    return await _one(world, rng, pick(rng, ("exit", "sys.exit")))


@action()
async def handler_hangs(world: World, rng: Random) -> str:
    """A request is never done."""
    return await _one(world, rng, "hang")


@action()
async def handler_poisons_its_process(world: World, rng: Random) -> str:
    """After a request everything fails, as after an error of a GPU."""
    return await _one(world, rng, "poison")


@action()
async def handler_leaves_a_child(world: World, rng: Random) -> str:
    """A request leaves a process behind, which must not outlive the server."""
    return await _one(world, rng, "child")


@action()
async def bad_requests_in_a_burst(world: World, rng: Random) -> str:
    """Many requests at once make the handler raise."""
    model, count = pick(rng, world.models), rng.randint(5, 20)
    misdeed = "break" if model.is_engine else "raise"
    with world.timeline.fault(FAILING_REQUEST, model.name):
        await asyncio.gather(*(send_bad(world, model, rng, misdeed) for _ in range(count)))
    return f"{count} of {model.name}"


@action(weight=4)
async def engine_fails(world: World, rng: Random) -> str:
    """A request ends the engine, or its answer never comes, has no end, or ends early."""
    misdeed = pick(rng, ("die", "die", "wait", "flood", "break"))
    return f"{misdeed}: {await _one(world, rng, misdeed)}"


@action(weight=2, is_exclusive=True)
async def engine_metrics_fail(world: World, rng: Random) -> str:
    """The metrics of engines do not come or have no end, and no scrape ends a worker."""
    fault, count = pick(rng, ("silent", "flood")), rng.randint(2, 10)
    file = Path(world.server.environment["STAND_IN_METRICS"])
    await world.wait_recovered(fully=False)
    before = await world.worker_pids(ENGINE)
    await asyncio.to_thread(file.write_text, fault)
    try:
        for _ in range(3):
            await asyncio.gather(*(scrape(world, rng, {}) for _ in range(count)))
    finally:
        await asyncio.to_thread(file.write_text, "")
    if before != (after := await world.worker_pids(ENGINE)):
        world.referee.violation(f"scrapes ended workers of {ENGINE.name}: {before}, now {after}")
    return f"{fault}, {3 * count} scrapes"
