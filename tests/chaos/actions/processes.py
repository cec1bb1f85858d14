"""Processes are killed and stopped: workers, the fork server, the frontend."""

import asyncio
import contextlib
import os
import signal
import time
from random import Random

import psutil

from chaos.actions.action import action
from chaos.rules import (
    FRONTEND_DOWN,
    FRONTEND_STOPPED,
    NO_STARTS,
    NOT_LOADED,
    WORKER_LOST,
    WORKER_STOPPED,
)
from chaos.served import ENGINE, RESPONSE_SECONDS
from chaos.world import World, pick

#: Seconds after a new start in which nothing of a killed server is left.
SWEEP_SECONDS = 10.0


def send_signal(pid: int, number: int) -> None:
    """Send it, if there is still anybody."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@action(weight=3)
async def kill_worker(world: World, rng: Random) -> str:
    """One worker ends without a word."""
    model = pick(rng, world.models)
    with world.timeline.fault(WORKER_LOST, model.name):
        pids = await world.worker_pids(model)
        if not pids:
            return f"{model.name}: none to kill"
        send_signal(pid := pick(rng, pids), signal.SIGKILL)
    return f"{model.name}: {pid}"


@action()
async def kill_all_workers_of_a_model(world: World, rng: Random) -> str:
    """All of them at once."""
    model = pick(rng, world.models)
    pids = await world.worker_pids(model)
    with contextlib.ExitStack() as faults:
        for pid in pids:  # whoever is sent from one to the next has seen two crashes
            faults.enter_context(world.timeline.fault(WORKER_LOST, model.name))
            send_signal(pid, signal.SIGKILL)
    return f"{model.name}: {pids}"


@action(weight=2)
async def stop_worker(world: World, rng: Random) -> str:
    """One worker stops for a while, shorter or longer than it may."""
    model = pick(rng, world.models)
    seconds = rng.uniform(0.2, 1.6 * RESPONSE_SECONDS)
    pids = await world.worker_pids(model)
    if not pids:
        return f"{model.name}: none to stop"
    pid = pick(rng, pids)
    with world.timeline.fault(WORKER_STOPPED, model.name):
        send_signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            send_signal(pid, signal.SIGCONT)
    return f"{model.name}: {pid} for {seconds:.1f} s"


@action()
async def kill_engine(world: World, rng: Random) -> str:
    """What a worker relays requests to ends without a word."""
    with world.timeline.fault(WORKER_LOST, ENGINE.name), contextlib.suppress(psutil.Error):
        pids = await world.worker_pids(ENGINE)
        victim = pick(rng, pids) if pids else 0
        engines = psutil.Process(victim).children() if victim else []
        for engine in engines:
            engine.kill()
        async with asyncio.timeout(10):  # its worker ends; a later action may compare the workers
            while engines and victim in await world.worker_pids(ENGINE):  # noqa: ASYNC110 - polled
                await asyncio.sleep(0.1)
        return f"{[engine.pid for engine in engines]}"
    return "none to kill"


@action()
async def kill_fork_server(world: World, rng: Random) -> str:
    """What workers come from ends."""
    fork_server = world.fork_server()
    if fork_server is None:
        return "there is none"
    with world.timeline.fault(NO_STARTS), contextlib.suppress(psutil.Error):
        fork_server.kill()
    return f"{fork_server.pid}"


@action()
async def stop_fork_server(world: World, rng: Random) -> str:
    """What workers come from stops, and a worker is needed."""
    fork_server, seconds = world.fork_server(), rng.uniform(0.5, 8.0)
    if fork_server is None:
        return "there is none"
    with world.timeline.fault(NO_STARTS), contextlib.suppress(psutil.Error):
        fork_server.suspend()
        try:
            killed = await kill_worker(world, rng)
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(psutil.Error):
                fork_server.resume()
    return f"{fork_server.pid} for {seconds:.1f} s, and killed {killed}"


@action()
async def stop_frontend(world: World, rng: Random) -> str:
    """The whole machine seems to pause, for it."""
    seconds = rng.uniform(0.2, 2 * RESPONSE_SECONDS)
    with world.timeline.fault(FRONTEND_STOPPED):
        send_signal(world.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            send_signal(world.pid, signal.SIGCONT)
    return f"for {seconds:.1f} s"


@action()
async def hang_up_frontend(world: World, rng: Random) -> str:
    """It is told to open its logs anew."""
    send_signal(world.pid, signal.SIGHUP)
    return ""


@action(is_exclusive=True)
async def kill_frontend(world: World, rng: Random) -> str:
    """It ends without a word, and is started again: the models must be back, the rest gone."""
    server = world.server
    with world.timeline.fault(FRONTEND_DOWN):
        old = await asyncio.to_thread(server.processes)
        unpacked = [path for path in server.temp.iterdir() if path.is_dir()]
        send_signal(world.pid, signal.SIGKILL)
        assert server.process is not None
        await asyncio.to_thread(server.process.wait)
        await asyncio.sleep(rng.uniform(0, 1))
        server.launch()
        await asyncio.to_thread(server.wait_ready)
        for model in world.models:
            if model.workflow:  # neither a snapshot nor the catalog has them
                await asyncio.to_thread(model.register_workflow, server)
    left = await _left_of(world, old)
    if left:
        world.referee.violation(f"left by a killed server: {[each.cmdline() for each in left]}")
        for process in left:
            process.kill()
    if kept := [str(path) for path in unpacked if path.exists()]:
        world.referee.violation(f"left in TEMP by a killed server: {kept}")
    with world.timeline.fault(NOT_LOADED) if world.catalog else contextlib.nullcontext():
        took = await world.wait_recovered(fully=False)  # models of a catalog come after the start
    return f"recovered after {took:.1f} s"


async def _left_of(world: World, old: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still live after their time to end."""
    deadline = time.monotonic() + SWEEP_SECONDS
    while True:
        living = await asyncio.to_thread(world.server.processes)
        left = [process for process in old if process in living]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)
