"""The watchers of the dashboard: how many there may be, and who leaves."""

import asyncio
from typing import Any

from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.errors import ServerBusy
from marserve.frontend.operations.dashboard import Dashboard
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.gpu import GpuReader
from marserve.frontend.workflows.workflow import WorkflowRegistry

LIMIT = 100


async def read_slowly() -> tuple[()]:
    await asyncio.sleep(1.0)
    return ()


def test_the_limit_holds_for_watchers_who_come_at_once(run):
    async def scenario():
        dashboard = Dashboard(ModelRegistry(), WorkflowRegistry(), GpuReader())
        dashboard._read_gpus = read_slowly
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


class SlowWork(LongWork):
    """Work of which each takes a second."""

    async def run(self, *arguments: Any) -> Any:
        await asyncio.sleep(1.0)
        return await super().run(*arguments)


async def events_of(stream: Stream, count: int) -> list[bytes]:
    pieces = stream.pieces()
    assert not await anext(pieces)  # the body of the first prediction
    return [bytes(await anext(pieces)) for _ in range(count)]


def test_a_watcher_who_leaves_while_the_details_are_made_leaves_nothing(run, serve_model):
    """The next watcher of the model got an event without members."""

    async def scenario():
        async with serve_model() as model:
            dashboard = Dashboard(
                ModelRegistry(), WorkflowRegistry(), GpuReader(), long_work=SlowWork()
            )
            leaving = asyncio.ensure_future(dashboard.watch(model))
            await asyncio.sleep(1.5)  # the overview is made
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            stream = await dashboard.watch(model)
            [event] = await events_of(stream, 1)
            assert b'"modelName":"m"' in event
            stream.close()

    run(scenario())


def test_a_watcher_who_comes_while_the_last_one_leaves_gets_events(run, serve_model):
    """The stream ended, as that of a model that is unregistered."""

    async def scenario():
        async with serve_model() as model:
            registry = ModelRegistry()
            registry.add(model)
            dashboard = Dashboard(registry, WorkflowRegistry(), GpuReader(), long_work=SlowWork())
            running = asyncio.ensure_future(dashboard.run())
            first = await dashboard.watch(model)
            coming = asyncio.ensure_future(dashboard.watch(model))
            await asyncio.sleep(0.5)
            first.close()
            _, event = await events_of(await coming, 2)
            assert b"event: model" in event
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run(scenario())
