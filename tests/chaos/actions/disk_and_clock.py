"""What the server stands on fails it: the disk, descriptors, the wall clock."""

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from random import Random

from chaos.actions.action import action
from chaos.actions.models import lying_archive
from chaos.actions.processes import kill_worker
from chaos.rules import NO_DESCRIPTORS, NO_STARTS
from chaos.world import World, pick


@action(weight=2)
async def full_disk(world: World, rng: Random) -> str:
    """Nothing can be written: logs, snapshots, archives; predictions go on."""
    seconds = rng.uniform(0.5, 4)
    with world.timeline.fault(NO_STARTS), _fill(world) as how:
        await kill_worker(world, rng)
        name = f"no-room-{rng.getrandbits(32):08x}"
        path = f"/models?url=churn-1.mar&model_name={name}&initial_workers=0"
        answer = await world.manage("POST", path)
        await lying_archive(world, rng)
        await asyncio.sleep(seconds)
        await world.manage("DELETE", f"/models/{name}", (200, 404))
    return f"{how} for {seconds:.1f} s; registering: {answer and answer.status}"


@contextlib.contextmanager
def _fill(world: World) -> Iterator[str]:
    """Fill the server's disk; where it has none of its own, none of its files may grow."""
    if world.disk is None:
        _, hard = resource.prlimit(world.pid, resource.RLIMIT_FSIZE)
        before = resource.prlimit(world.pid, resource.RLIMIT_FSIZE, (0, hard))
        try:
            yield "no file may grow"
        finally:
            resource.prlimit(world.pid, resource.RLIMIT_FSIZE, before)
        return
    filler = world.disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x")
        yield "full"
    finally:
        filler.unlink()


@action(weight=2)
async def no_descriptors(world: World, rng: Random) -> str:
    """The frontend may open hardly any file more, and a worker dies meanwhile."""
    seconds, spare = rng.uniform(0.5, 4), pick(rng, (0, 3, 10, 40))
    pid = world.pid
    used = _highest_descriptor(pid)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with world.timeline.fault(NO_DESCRIPTORS), world.timeline.fault(NO_STARTS):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 1 + spare, hard))
        try:
            await kill_worker(world, rng)
            await asyncio.sleep(seconds)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    return f"{spare} for {seconds:.1f} s"


@action(weight=2)
async def move_the_clock(world: World, rng: Random) -> str:
    """The wall clock jumps, and stays there; monotonic time does not."""
    ahead = rng.choice((-1, 1)) * 10 ** rng.uniform(0, 6)
    world.set_clock(ahead)
    return f"{ahead:+.0f} s"


def _highest_descriptor(pid: int) -> int:
    return max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
