"""The watchers of the dashboard: how many there may be, and who leaves."""

import asyncio
from collections.abc import Callable
from typing import Any

from marserve.frontend.errors import ServerBusy
from marserve.frontend.operations.dashboard import Dashboard
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.gpu import GpuReader
from marserve.frontend.workflows.workflow import WorkflowRegistry

LIMIT = 100


async def read_slowly() -> tuple[()]:
    await asyncio.sleep(1.0)
    return ()


def test_the_limit_holds_for_watchers_who_come_at_once(run: Callable[..., Any]) -> None:
    async def scenario() -> None:
        dashboard = Dashboard(ModelRegistry(), WorkflowRegistry(), GpuReader())
        dashboard._read_gpus = read_slowly  # type: ignore[method-assign]
        watchers = [asyncio.ensure_future(dashboard.watch(None)) for _ in range(3 * LIMIT)]
        await asyncio.sleep(0.5)
        watchers[0].cancel()
        found = await asyncio.gather(*watchers, return_exceptions=True)
        assert sum(isinstance(each, ServerBusy) for each in found) == 2 * LIMIT
        streams = [each for each in found if not isinstance(each, BaseException)]
        assert len(streams) == LIMIT - 1
        streams.append(await dashboard.watch(None))  # in place of the one who left
        again = await asyncio.gather(dashboard.watch(None), return_exceptions=True)
        assert isinstance(again[0], ServerBusy)
        for stream in streams:
            stream.close()
        await dashboard.watch(None)

    run(scenario())
