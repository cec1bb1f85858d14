"""Requests of a stream that are answered concurrently.

Each request has a task; the tasks start in the order of the requests. A request is in progress
until the client has read its last answer. At the maximum, no further request is read, and grpc's
flow control stops the client. So neither a fast nor a slow client makes the server keep more.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from marserve.frontend.grpc.messages import Answers, Message

#: Yields the answers to a request.
Answer = Callable[[Message], Answers]


class RequestStream:
    """The requests of one call, of which ``max_under_way`` may be in progress."""

    def __init__(
        self, answer: Answer, requests: AsyncIterator[Message], max_under_way: int
    ) -> None:
        self._answer = answer
        self._requests = requests
        self._slots = asyncio.Semaphore(max_under_way)
        self._ready: asyncio.Queue[Message | Exception | None] = asyncio.Queue(maxsize=1)
        #: Keeps the order of waiting tasks, which a full queue does not.
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def answers(self) -> Answers:
        """Yield answers as they are ready; at the end all requests are answered."""
        self._start(self._read())
        try:
            while (item := await self._ready.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                await self._slots.acquire()
                self._start(self._run(request))
        except Exception as error:  # noqa: BLE001 - `answers` raises it
            await self._ready.put(error)
        reader = asyncio.current_task()
        if others := [task for task in self._tasks if task is not reader]:
            await asyncio.wait(others)
        await self._ready.put(None)

    async def _run(self, request: Message) -> None:
        try:
            async for answer in self._answer(request):
                async with self._turn:
                    await self._ready.put(answer)
        except Exception as error:  # noqa: BLE001 - `answers` raises it
            await self._ready.put(error)
        finally:
            self._slots.release()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
