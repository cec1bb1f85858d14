import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.frontend.aio.background import BackgroundTasks
from marserve.frontend.errors import Conflict, WorkersFailed
from marserve.frontend.registration.worker_changes import WorkerChanges
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.worker_pool import WorkerOrder


class Worker:
    """One that has not been loaded yet."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Exception | None] = asyncio.Future()

    async def first_outcome(self) -> Exception | None:
        return await asyncio.shield(self.outcome)


@pytest.mark.parametrize("ticks", range(12))
def test_an_order_superseded_just_as_its_worker_failed_was_told_that_the_server_stops(run, ticks):
    async def scenario():
        model = SimpleNamespace(name="m", version="1.0")
        changes = WorkerChanges(ModelRegistry(), BackgroundTasks(), Any, 1.0)  # type: ignore[arg-type] # needs none
        order, workers = WorkerOrder(1, 1), [Worker(), Worker()]
        waiting = asyncio.create_task(changes.wait_until_up(model, order, workers))  # type: ignore[arg-type] # stand-ins
        for _ in range(10):
            await asyncio.sleep(0)
        workers[0].outcome.set_result(ValueError("broken"))
        for _ in range(ticks):
            await asyncio.sleep(0)
        order.superseded.set()
        await asyncio.wait({waiting})
        assert not waiting.cancelled()
        assert isinstance(waiting.exception(), Conflict | WorkersFailed)

    run(scenario())
