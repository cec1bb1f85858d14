"""What clients and actions share: the server, its models, and those who keep the record."""

import asyncio
import itertools
import json
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import psutil
from servers import Server

from chaos.http_client import Answer, Lost, ask
from chaos.referee import Referee
from chaos.rules import FRONTEND_DOWN, FRONTEND_STOPPED, NO_DESCRIPTORS, NO_STARTS
from chaos.served import ALL, Served
from chaos.timeline import Timeline

T = TypeVar("T")

#: Seconds in which a management request is answered: a load may use up its startupTimeout.
MANAGEMENT_SECONDS = 20.0
#: Seconds after the last fault in which all models have all of their workers READY again: workers
#: that failed again and again start after pauses of up to 13 s.
RECOVERY_SECONDS = 30.0


def pick(rng: Random, items: Sequence[T]) -> T:
    """One of them, whatever their number: it takes one draw."""
    return items[int(rng.random() * len(items))]


class World:
    """See the module.

    Attributes:
        over: Set when clients are to end.
        is_calm: Whether no client asks for a failure any more.
        disk: The small file system that the server is on; None where none can be mounted.
        catalog: The file of which the server has its models; None where it writes snapshots.
    """

    def __init__(
        self, server: Server, clock: Path, disk: Path | None, catalog: Path | None
    ) -> None:
        self.server = server
        self.disk = disk
        self.catalog = catalog
        self.timeline = Timeline()
        self.referee = Referee(self.timeline)
        self.models = ALL
        self.over = asyncio.Event()
        self.is_calm = False
        self._clock = clock
        self._tokens = itertools.count()

    @property
    def pid(self) -> int:
        """The frontend."""
        assert self.server.process is not None
        return self.server.process.pid

    def token(self, name: str) -> str:
        """Never seen before."""
        return f"{name}-{next(self._tokens):x}"

    def set_clock(self, ahead: float) -> None:
        """Let the server's wall clock be so many seconds ahead of ours."""
        with self._clock.open("r+b") as file:
            file.write(struct.pack("d", ahead))

    def felt(self, *kinds: str, since: float | None = None) -> bool:
        """Whether faults that touch everybody can be felt since then, or now."""
        now = time.monotonic()
        since = now if since is None else since
        return any(self.timeline.count(kind, "", since, now) for kind in kinds)

    async def manage(
        self,
        method: str,
        path: str,
        allowed: Sequence[int] = (),
        listener: str = "management",
        headers: str = "",
        seconds: float = MANAGEMENT_SECONDS,
    ) -> Answer | None:
        """Ask the management listener or another; the answer, or None if there may be none.

        It must come in time, and with one of the statuses that are allowed, if any are given.
        """
        since = time.monotonic()
        what = f"{method} {path}"
        try:
            answer, took = await ask(
                self.server.ports[listener], method, path, headers, seconds=seconds + 10
            )
        except (OSError, Lost, TimeoutError) as error:
            excuses = [FRONTEND_DOWN, NO_DESCRIPTORS]
            if isinstance(error, Lost):
                excuses.append(FRONTEND_STOPPED)  # see `rules`
            if not self.felt(*excuses, since=since):
                self.referee.violation(f"{what}: {type(error).__name__} {error}")
            return None
        if answer.status == 503 and self.felt(NO_DESCRIPTORS, since=since):
            return None  # "Too many connections"
        took -= self.timeline.seconds(FRONTEND_STOPPED, since, time.monotonic())
        kind = f"{method} /{path.split('/')[1].partition('?')[0]}"
        self.referee.slowest[kind] = max(self.referee.slowest[kind], took)
        if took > seconds:
            self.referee.violation(f"{what}: answered {answer.status} after {took:.1f} s")
        if allowed and self.felt(NO_STARTS, since=since):
            allowed = (*allowed, 400, 500)  # nothing can be unpacked, no worker comes up
        if allowed and self.catalog and method != "GET":
            allowed = (*allowed, 403)  # only nodes of workflows can be changed by requests
        if allowed and answer.status not in allowed:
            self.referee.violation(f"{what}: {answer.status} {answer.text[:300]}")
        return answer

    async def describe(self, name: str) -> dict[str, Any] | None:
        """The default version of a model; None if there is none, or no answer."""
        answer = await self.manage("GET", f"/models/{name}")
        if answer is None or answer.status != 200:
            return None
        described: dict[str, Any] = json.loads(answer.text)[0]
        return described

    async def worker_pids(self, model: Served) -> list[int]:
        """Its workers that have a process."""
        described = await self.describe(model.name)
        workers = described["workers"] if described else []
        return sorted(worker["pid"] for worker in workers if worker.get("pid", 0) > 0)

    def fork_server(self) -> psutil.Process | None:
        """The process that workers are forked from."""
        for child in psutil.Process(self.pid).children():
            try:
                if any("fork_server" in word or "forkserver" in word for word in child.cmdline()):
                    return child
            except psutil.Error:
                continue
        return None

    async def wait_recovered(self, *, fully: bool, seconds: float = RECOVERY_SECONDS) -> float:
        """Wait until all workers are READY, ``fully``: as many as at first; how long it took."""
        began = time.monotonic()
        waiting: dict[str, object] = {model.name: "?" for model in self.models}
        while waiting and time.monotonic() - began < seconds:
            for model in self.models:
                if model.name in waiting:
                    described = await self.describe(model.name)
                    workers = described["workers"] if described else []
                    states = [worker["status"] for worker in workers]
                    waiting[model.name] = states
                    is_enough = len(states) == model.workers or (states and not fully)
                    if is_enough and set(states) == {"READY"}:
                        del waiting[model.name]
            await asyncio.sleep(0.05)
        if waiting:
            self.referee.violation(f"not recovered after {seconds} s: {waiting}")
        return time.monotonic() - began
