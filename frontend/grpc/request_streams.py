"""Requests of a stream that are answered concurrently.

Each request has a task; the tasks start in the order of the requests. A request is in progress
until the client has read its last answer. At the maximum, no further request is read, and grpc's
flow control stops the client. So neither a fast nor a slow client makes the server keep more.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, Self

from marserve.frontend.grpc.messages import Answers, Message
from marserve.frontend.serving.model_version import ModelVersion

# Requests of one stream that are not answered, or whose answers the client has not read.
_MAX_UNDER_WAY = 64
_MIN_LIMIT = 64
# grpc.aio may end the requests of a cancelled call before it cancels the task (grpcio 1.85).
_SECONDS_TO_CANCEL = 0.5


async def answer_stream(
    answer: Callable[..., Answers], requests: AsyncIterator[Message]
) -> Answers:
    """Yield the answers to a stream of requests, which do not wait for each other.

    ``answer`` gets a request, and adds its sequence to those ``used``: they end when the client
    breaks the stream off.
    """
    async with StreamSequences() as used:
        stream = RequestStream(partial(answer, used=used), requests, _MAX_UNDER_WAY)
        async with aclosing(stream.answers()) as messages:
            async for message in messages:
                yield message


class RequestStream:
    """The requests of one call, of which ``max_under_way`` may be in progress."""

    def __init__(
        self,
        answer: Callable[[Message], Answers],
        requests: AsyncIterator[Message],
        max_under_way: int,
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


class StreamSequences:
    """The open sequences of one stream, for an ``async with`` block that answers the stream.

    If sequences are open at the end of the requests, the block ends a moment later, to find out
    whether the client has cancelled the call. A stream may last for days, so ended sequences are
    removed from time to time.
    """

    def __init__(self) -> None:
        self._used: set[tuple[ModelVersion, str]] = set()
        self._limit = _MIN_LIMIT

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        is_broken_off = kind is not None
        try:
            if not is_broken_off and any(model.has_sequence(id_) for model, id_ in self._used):
                await asyncio.sleep(_SECONDS_TO_CANCEL)
        except asyncio.CancelledError:
            is_broken_off = True
            raise
        finally:
            for model, sequence_id in self._used if is_broken_off else ():
                model.leave_sequence(sequence_id)

    def __len__(self) -> int:
        return len(self._used)

    def add(self, model: ModelVersion, sequence_id: str | None) -> None:
        """Add the sequence of a request that was answered; does nothing without an id."""
        if sequence_id and model.has_sequence(sequence_id):
            self._used.add((model, sequence_id))
        # Twice those that are left, so that each is checked rarely.
        if len(self._used) > self._limit:
            self._used = {(each, id_) for each, id_ in self._used if each.has_sequence(id_)}
            self._limit = max(_MIN_LIMIT, 2 * len(self._used))
