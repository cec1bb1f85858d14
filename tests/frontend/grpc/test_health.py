"""Streams that watch the readiness of the server and of its models."""

import asyncio
from types import SimpleNamespace
from typing import Any

from fakes import drain_loop

from marserve.frontend.grpc.health import health_service
from marserve.frontend.serving.registry import ModelRegistry

WATCHERS = 1000


class CountingRegistry(ModelRegistry):
    """Counts how often all models are looked at."""

    looks = 0

    def defaults(self) -> Any:
        self.looks += 1
        return super().defaults()


class Watchers:
    """Streams of one listener; each has a list of the states that it was sent."""

    def __init__(self, registry: ModelRegistry) -> None:
        self.stopping = asyncio.Event()
        self.states: list[list[int]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._service: Any = health_service(registry).calls

    def open(self) -> None:
        states: list[int] = []
        self.states.append(states)
        self.tasks.append(asyncio.ensure_future(self._watch(states)))

    async def _watch(self, states: list[int]) -> None:
        call = SimpleNamespace(stopping=self.stopping)
        async for answer in self._service.watch(SimpleNamespace(service=""), call):
            states += [answer.status]


def test_many_streams_cost_no_more_looks_than_one_and_all_get_each_change(run):
    async def main():
        registry = CountingRegistry()
        watchers = Watchers(registry)
        for _ in range(WATCHERS):
            watchers.open()
        await drain_loop()
        before = registry.looks
        await asyncio.sleep(60)
        assert registry.looks - before <= 4 * 60
        registry.is_leaving = True
        await asyncio.sleep(1)
        assert watchers.states == [[1, 2]] * WATCHERS
        watchers.stopping.set()
        await asyncio.gather(*watchers.tasks)

    run(main())


def test_a_change_while_a_stream_is_being_opened_is_sent(run):
    async def main():
        registry = ModelRegistry()
        watchers = Watchers(registry)
        watchers.open()
        await asyncio.sleep(0)
        registry.is_leaving = True
        await asyncio.sleep(1)
        assert watchers.states[0][-1] == 2
        watchers.stopping.set()
        await asyncio.gather(*watchers.tasks)

    run(main())


def test_the_end_of_all_streams_ends_the_looks(run):
    async def main():
        registry = CountingRegistry()
        watchers = Watchers(registry)
        watchers.open()
        await drain_loop()
        watchers.tasks[0].cancel()
        await asyncio.gather(*watchers.tasks, return_exceptions=True)
        await asyncio.sleep(1)
        before = registry.looks
        await asyncio.sleep(10)
        assert registry.looks == before
        watchers.open()  # and it begins again
        await drain_loop()
        registry.is_leaving = True
        await asyncio.sleep(1)
        assert watchers.states[1] == [1, 2]
        watchers.stopping.set()
        await asyncio.gather(*watchers.tasks, return_exceptions=True)

    run(main())
