"""Limits the memory of incomplete messages.

grpc.aio returns a message when it is complete. Until then no call gives the number of bytes that
have arrived, and Python cannot set a memory limit in grpc. So the number of messages that are read
at a time is limited to those that fit if each has the maximum length. While more calls wait to read
a message, long reads end with an error.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from marserve.frontend.errors import ServeError

_SECONDS_BETWEEN_CHECKS = 1.0

Context = grpc.aio.ServicerContext[Any, Any]
#: Ends a call with an error.
Fail = Callable[[ServeError], Awaitable[object]]


async def next_message(context: Context) -> bytes | None:
    """Return the next message of a call; None at the end of its requests."""
    data = await context.read()
    return None if data is grpc.aio.EOF else data  # type: ignore[attr-defined]  # not in the stubs


@dataclass(slots=True, eq=False)
class _Read:
    client: str
    fail: Fail
    since: float
    is_over: bool = False
    ending: asyncio.Task[None] | None = None

    def end(self, error: ServeError) -> None:
        """End the call, whose read then raises AbortError.

        The read itself is not cancelled: grpc.aio would never free its message, if that is complete
        by now (grpcio 1.85).
        """
        if self.ending is None:
            self.ending = asyncio.create_task(self._end(error))

    async def _end(self, error: ServeError) -> None:
        if not self.is_over:  # else the message has just arrived, and is answered
            with contextlib.suppress(grpc.aio.BaseError):  # an abort always raises
                await self.fail(error)


class MessageReads:
    """Reads the first messages of calls that share a limit, at most ``slots`` at a time.

    A free slot goes to the newest call of the client with the fewest slots. So one client does not
    block the others, and a complete message does not wait behind incomplete ones. A read lasts
    ``undisturbed`` seconds before it may end because others wait; after ``timeout`` seconds a wait,
    or a read, ends.
    """

    def __init__(self, slots: int, max_bytes: int, undisturbed: float, timeout: float) -> None:
        self._free = slots
        self._max_bytes = max_bytes
        self._undisturbed = undisturbed
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._reads: dict[_Read, None] = {}  # oldest first
        #: By client, oldest first.
        self._waiting: dict[str, dict[_Read, asyncio.Future[None]]] = {}
        #: Slots of each client.
        self._held: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    async def first(self, context: Context, client: str, fail: Fail) -> bytes | None:
        """Return the first message of a call; None if the client ends its requests without one.

        ``fail`` ends the call, whose read then raises AbortError, where its message is not complete
        in time (504), or when calls of others need its slot (429).

        Raises:
            ServeError: It has not got a slot in time (504), or has too many bytes (413).
        """
        read = _Read(client, fail, self._loop.time())
        self._set_timer()
        if self._free:
            self._free -= 1
            self._held[client] += 1
        else:
            await self._wait(read)
        self._reads[read] = None
        try:
            data = await context.read()  # not `next_message`: each coroutine costs time
        finally:
            read.is_over = True
            del self._reads[read]
            self._release(client)
        if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # as above
            return None
        if len(data) > self._max_bytes:
            raise ServeError(f"The message has more than {self._max_bytes} bytes.", status=413)
        received: bytes = data
        return received

    async def _wait(self, read: _Read) -> None:
        """Wait for a slot; no deadline, because `_check` ends it."""
        self._waiting.setdefault(read.client, {})[read] = slot = self._loop.create_future()
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self._release(read.client)
            else:
                self._remove(read)
            raise
        read.since = self._loop.time()

    def _remove(self, read: _Read) -> None:
        calls = self._waiting.get(read.client, {})
        calls.pop(read, None)
        if not calls:
            self._waiting.pop(read.client, None)

    def _release(self, client: str) -> None:
        """Pass the slot of a client to a call that waits, or free it."""
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        while self._waiting:
            client = min(self._waiting, key=self._held.__getitem__)
            read, slot = next(reversed(self._waiting[client].items()))
            self._remove(read)
            if not slot.done():
                self._held[client] += 1
                slot.set_result(None)
                return
        self._free += 1

    def _set_timer(self) -> None:
        if self._timer is None:
            seconds = min(self._undisturbed, _SECONDS_BETWEEN_CHECKS)
            self._timer = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        """End late reads and waits, and one disturbed read for each call that waits."""
        self._timer = None
        now = self._loop.time()
        for read in self._reads:
            if read.since + self._timeout <= now:
                read.end(self._late())
        waiting = [each for calls in self._waiting.values() for each in calls.items()]
        for read, slot in waiting:
            if read.since + self._timeout <= now:
                self._remove(read)
                if not slot.done():
                    slot.set_exception(self._late())
        for read in self._disturbed(now)[: len(waiting)]:
            text = "Other calls need the memory for this incomplete message."
            read.end(ServeError(text, status=429))
        if self._reads or self._waiting:
            self._set_timer()

    def _late(self) -> ServeError:
        return ServeError(f"No message arrived within {self._timeout:g} s.", status=504)

    def _disturbed(self, now: float) -> list[_Read]:
        """Return the reads that may end because others wait.

        Those of the client with the most reads come first; of one client, the oldest.
        """
        left = self._held.copy()
        found: list[tuple[int, _Read]] = []
        for read in self._reads:
            if read.since + self._undisturbed <= now:
                found.append((left[read.client], read))
            left[read.client] -= 1
        return [read for _, read in sorted(found, key=lambda each: each[0], reverse=True)]
