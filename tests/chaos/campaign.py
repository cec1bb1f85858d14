"""A run from its beginning to its end: start, load, actions, recovery, what is left."""

import asyncio
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from chaos.actions import ACTIONS
from chaos.actions.models import pack_churn
from chaos.actions.processes import SWEEP_SECONDS
from chaos.clients import keep_asking, keep_pinging
from chaos.grpc_clients import keep_calling
from chaos.leftovers import check_idle, files_left, footprint
from chaos.operators import Page, check_pages, keep_scraping, keep_watching
from chaos.rules import ANSWER_SECONDS
from chaos.schedule import Step, steps
from chaos.timeline import AFTERMATH
from chaos.world import MANAGEMENT_SECONDS, RECOVERY_SECONDS, World

_CLIENTS_PER_MODEL = 2
_GRPC_CLIENTS = 4
_PAGES, _SCRAPERS = 4, 2
#: Seconds of load with no fault, at the end: every answer must be 200 then.
CALM_SECONDS = 3.0
#: Seconds in which every action has undone what it did: some register, kill and recover.
_ACTION_SECONDS = 3 * MANAGEMENT_SECONDS + RECOVERY_SECONDS + SWEEP_SECONDS
_STOP_SECONDS = 20.0
#: What a run takes beside its seconds, at most.
OVERHEAD_SECONDS = (
    60 + _ACTION_SECONDS + 2 * RECOVERY_SECONDS + CALM_SECONDS + ANSWER_SECONDS + _STOP_SECONDS
)


class Campaign:
    """A run; ``tasks`` is the file to which the server writes its tasks."""

    def __init__(self, world: World, tasks: Path, seed: int, seconds: float) -> None:
        self._world = world
        self._referee = world.referee
        self._tasks = tasks
        self._seed = seed
        self._seconds = seconds
        self._actions: Counter[str] = Counter()
        self._running: set[asyncio.Task[None]] = set()
        self._pages: set[Page] = set()
        #: None happens twice at a time: one that undoes itself would undo the other.
        self._locks = {name: asyncio.Lock() for name in ACTIONS}

    async def run(self) -> None:
        """All of it; what was not allowed is in the referee's violations."""
        try:
            await self._run()
        except Exception:  # noqa: BLE001 - the server is gone, say: told in the report
            self._referee.violation(f"the run ended early: {traceback.format_exc()}")

    async def _run(self) -> None:
        world = self._world
        await asyncio.to_thread(self._begin)
        archives = {path.name for path in world.server.store.iterdir()}
        before = await asyncio.to_thread(footprint, world.pid, self._tasks)
        self._referee.note(f"begins: {before}")
        load = self._start_load()
        try:
            await self._perform_actions()
            await self._recover()
        finally:
            world.over.set()
            await self._end(load)
        after = await check_idle(world, before, self._tasks)
        self._referee.note(f"ends: {after}")
        await asyncio.to_thread(self._stop, archives)
        self._referee.close()

    def report(self, *, with_journal: bool) -> str:
        """What happened, in figures; with the journal if something was wrong."""
        referee = self._referee
        lines = [f"{referee.count} requests, {self._actions.total()} actions"]
        lines += [f"  {name}: {count}" for name, count in sorted(self._actions.items())]
        for model, counts in sorted(referee.outcomes.items()):
            lines.append(f"{model}: slowest {referee.slowest[model]:.2f} s, {dict(counts)}")
        for what in sorted(what for what in referee.slowest if "/" in what):
            lines.append(f"{what}: slowest {referee.slowest[what]:.3f} s")
        if with_journal:
            lines += ["", *referee.journal, "", "VIOLATIONS", *referee.violations]
        return "\n".join(lines)

    # -- the parts of a run ------------------------------------------------------------------------

    def _begin(self) -> None:
        server = self._world.server
        pack_churn(server.store)
        server.habits = []  # snapshots are written, and found by the next start
        server.start()
        for model in self._world.models:
            model.install(server, self._world.catalog)

    def _start_load(self) -> list[asyncio.Task[None]]:
        clients = [
            keep_asking(self._world, model, Random(f"client {self._seed} {model.name} {number}"))
            for model in self._world.models
            for number in range(_CLIENTS_PER_MODEL)
        ]
        clients += [
            keep_calling(self._world, Random(f"grpc {self._seed} {number}"))
            for number in range(_GRPC_CLIENTS)
        ]
        for number in range(_PAGES):
            rng = Random(f"page {self._seed} {number}")
            clients.append(keep_watching(self._world, self._pages, rng))
        for number in range(_SCRAPERS):
            clients.append(keep_scraping(self._world, Random(f"scrapes {self._seed} {number}")))
        return [asyncio.create_task(client) for client in (*clients, keep_pinging(self._world))]

    async def _perform_actions(self) -> None:
        until = time.monotonic() + self._seconds
        weights = {name: action.weight for name, action in ACTIONS.items()}
        for step in steps(self._seed, weights):
            await asyncio.sleep(step.pause)
            is_exclusive = ACTIONS[step.action].is_exclusive
            if is_exclusive:
                await self._wait_for_actions()
            if time.monotonic() > until:
                break
            task = asyncio.create_task(self._perform(step))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            if is_exclusive:
                await self._wait_for_actions()
        await self._wait_for_actions()

    async def _perform(self, step: Step) -> None:
        async with self._locks[step.action]:
            await self._perform_alone(step)

    async def _perform_alone(self, step: Step) -> None:
        self._actions[step.action] += 1
        began = self._referee.now
        try:
            result = await ACTIONS[step.action].perform(self._world, step.rng)
        except Exception as error:  # noqa: BLE001 - told in the report, and the run goes on
            self._referee.violation(f"#{step.number} {step.action}: {error!r}")
        else:
            self._referee.note(f"#{step.number} {step.action} since {began:.3f}: {result}")

    async def _wait_for_actions(self) -> None:
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=_ACTION_SECONDS)
            for task in late:
                self._referee.violation(f"an action does not end: {task}")
                task.cancel()

    async def _recover(self) -> None:
        """The faults have ended: put back what was changed, and see that all is well soon."""
        world = self._world
        world.is_calm = True
        world.set_clock(0.0)
        for model in world.models:
            size = model.query.get("batch_size", 1)
            await world.manage(
                "PUT",
                f"/models/{model.name}?min_worker={model.workers}&max_worker={model.workers}"
                f"&batch_size={size}&max_batch_delay={model.query.get('max_batch_delay', 100)}",
                (200, 202),
            )
        took = await world.wait_recovered(fully=True)
        self._referee.note(f"recovered after {took:.1f} s")
        await asyncio.sleep(AFTERMATH)
        innocents = self._referee.innocents
        failed = innocents.total() - innocents["200"]
        await asyncio.sleep(CALM_SECONDS)
        if innocents.total() - innocents["200"] > failed:
            self._referee.violation(f"innocents fail when all is well: {dict(innocents)}")
        await check_pages(world, self._pages)

    async def _end(self, load: list[asyncio.Task[None]]) -> None:
        done, late = await asyncio.wait(load, timeout=ANSWER_SECONDS + 5)
        for task in late:
            task.cancel()
            self._referee.violation("a client does not end")
        for task in done:
            if not task.cancelled() and (error := task.exception()):
                self._referee.violation(f"a client ended early: {error!r}")

    def _stop(self, archives: set[str]) -> None:
        """The server ends in order, in time, and leaves nothing."""
        server = self._world.server
        began = time.monotonic()
        try:
            server.terminate()
            server.wait_stopped(_STOP_SECONDS)
        except Exception as error:  # noqa: BLE001 - whatever was wrong, it is told in the report
            self._referee.violation(f"stopping: {error}"[-2000:])
        self._referee.note(f"stopped after {time.monotonic() - began:.1f} s")
        for problem in files_left(self._world, archives):
            self._referee.violation(problem)
