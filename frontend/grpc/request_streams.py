"""Requests that come in a stream and are answered side by side.

Each is answered in a task of its own, started in the order of the requests. A request counts as
under way until the client has taken its last answer; while too many are, no further is read, and
grpc tells the client to wait. So neither a client that asks fast nor one that reads slowly makes
the server hold more.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from marserve.frontend.grpc.messages import Answers, Message

#: Makes the answers to a request.
Answer = Callable[[Message], Answers]


class RequestStream:
    """The requests of one call.

    Args:
        answer: Answers one.
        requests: As they come; what it raises is raised by `answers`.
        max_under_way: How many may be answered at the same time.
    """

    def __init__(
        self, answer: Answer, requests: AsyncIterator[Message], max_under_way: int
    ) -> None:
        self._answer = answer
        self._requests = requests
        self._places = asyncio.Semaphore(max_under_way)
        self._ready: asyncio.Queue[Message | Exception | None] = asyncio.Queue(maxsize=1)
        #: A queue that is full lets a newcomer pass those that wait for it; a lock does not.
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def answers(self) -> Answers:
        """The answers as they come, until all requests have theirs; then nothing is under way."""
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
                await self._places.acquire()
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
            self._places.release()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
