"""What a run leaves: measured before and after, and compared."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaos.world import World

#: How much more there may be in the end. Threads of pools stay once they were needed; connections
#: and files are closed a moment later; memory that was freed is not all given back to the system.
SPARE_DESCRIPTORS = 12
SPARE_THREADS = 16
SPARE_TASKS = 4
SPARE_BYTES = 250 << 20
_MOMENT = 5.0  # seconds in which what was closed is gone


@dataclass(frozen=True)
class Footprint:
    """What the frontend has: all of it counted from outside, but for the tasks."""

    descriptors: tuple[str, ...]
    threads: int
    rss: int
    children: tuple[str, ...]
    tasks: tuple[str, ...]

    def __str__(self) -> str:
        """For reports."""
        return (
            f"{len(self.descriptors)} descriptors, {self.threads} threads, {self.rss >> 20} MiB, "
            f"{len(self.children)} processes below it, {len(self.tasks)} tasks"
        )

    def grown(self, before: "Footprint") -> list[str]:
        """What there is too much of."""
        found = []
        for name, spare in (
            ("threads", SPARE_THREADS),
            ("rss", SPARE_BYTES),
        ):
            was, is_now = getattr(before, name), getattr(self, name)
            if is_now > was + spare:
                found.append(f"{name}: {was} before, {is_now} after")
        for name, spare in (
            ("descriptors", SPARE_DESCRIPTORS),
            ("tasks", SPARE_TASKS),
            ("children", 0),
        ):
            were, are = getattr(before, name), getattr(self, name)
            if len(are) > len(were) + spare:
                found.append(f"{name}: {len(were)} before, {len(are)} after")
                found += [f"before: {Counter(were)}", f"after: {Counter(are)}"]
        return found


def footprint(pid: int, tasks: Path) -> Footprint:
    """Measure a server that does nothing at the moment."""
    process = psutil.Process(pid)
    tasks.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + _MOMENT
    while not tasks.exists():
        if time.monotonic() > deadline:
            raise AssertionError("the server does not say which tasks it has")
        time.sleep(0.01)
    return Footprint(
        descriptors=tuple(_descriptors(pid)),
        threads=process.num_threads(),
        rss=process.memory_info().rss,
        children=tuple(filter(None, map(_command, process.children(recursive=True)))),
        tasks=tuple(tasks.read_text().splitlines()),
    )


def _descriptors(pid: int) -> Iterator[str]:
    """What each is: a path, or the kind of it without its number."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = str(path.readlink())
            yield target if target.startswith("/") else target.partition(":[")[0]


def _command(process: psutil.Process) -> str:
    """What it is; empty if it has ended, or a handler has left it, for its worker still lives."""
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return "" if "signal.pause()" in command else f"{process.pid} {command[-200:]}"
    return ""


async def check_idle(world: World, before: Footprint, tasks: Path) -> Footprint:
    """When nobody asks any more: no request is left in the server, and nothing has grown."""
    deadline = time.monotonic() + _MOMENT
    while True:
        after = await asyncio.to_thread(footprint, world.pid, tasks)
        problems = after.grown(before) + await _requests_left(world)
        if not problems or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    for problem in problems:
        world.referee.violation(f"left at the end: {problem}")
    return after


async def _requests_left(world: World) -> list[str]:
    samples = await asyncio.to_thread(world.server.metrics, "marserve_open_requests")
    found = [f"{series} {value:g}" for series, value in samples.items() if value]
    for model in world.models:
        described = await world.describe(model.name)
        pending = described["jobQueueStatus"]["pendingRequests"] if described else "no answer"
        if pending:
            found.append(f"queue of {model.name}: {pending}")
    return found


def files_left(world: World, archives: set[str]) -> list[str]:
    """After the end: what lies about in the model store and among the logs; TEMP is empty."""
    store = {path.name for path in world.server.store.iterdir()} - archives
    logs = world.server.directory / "logs"
    unfinished = [path.name for path in logs.rglob(".*")]
    return [f"a file nobody wants: {name}" for name in sorted(store) + unfinished]
