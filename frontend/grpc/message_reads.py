"""Limits the memory of messages that clients have not sent completely.

grpc.aio returns a message when it is complete. Until then no call gives the number of bytes that
have arrived, and grpc cannot be given a limit of memory from Python. So the number of messages that
are read at a time is limited to those that fit if each is as long as allowed. While more calls have
a message to read, reads that last long end with an error.
"""

import asyncio
from typing import Any

import grpc

from marserve.frontend.errors import ServeError

_SECONDS_BETWEEN_CHECKS = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


async def next_message(context: Context) -> bytes | None:
    """Return the next message of a call; None at the end of its requests."""
    data = await context.read()
    return None if data is grpc.aio.EOF else data  # type: ignore[attr-defined]  # not in the stubs


class _Read:
    """A call whose first message is read, or waits for its slot."""

    __slots__ = ("error", "since", "task")

    def __init__(self, task: asyncio.Task[Any], since: float) -> None:
        self.task = task
        self.since = since
        self.error: ServeError | None = None

    def end(self, reason: str, status: int) -> None:
        if self.error is None:
            self.error = ServeError(reason, status=status)
            self.task.cancel()


class MessageReads:
    """Reads the first messages of calls that share a limit.

    A slot that becomes free goes to the call that came last. Where clients hold all slots and many
    calls wait, a call whose message is there already is then not behind all the others.

    Args:
        slots: Messages that are read at a time.
        max_bytes: Of a message.
        undisturbed: Seconds that a read lasts before it may end because others wait.
        timeout: Seconds after which a wait, or a read, ends.
    """

    def __init__(self, slots: int, max_bytes: int, undisturbed: float, timeout: float) -> None:
        self._free = slots
        self._max_bytes = max_bytes
        self._undisturbed = undisturbed
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        #: Both oldest first.
        self._reads: dict[_Read, None] = {}
        self._waiting: dict[_Read, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def first(self, context: Context) -> bytes | None:
        """Return the first message of a call; None if the client ends its requests without one.

        Raises:
            ServeError: It has not come in time (504), has too many bytes (413), or was not complete
                when others needed its slot (429).
        """
        task = asyncio.current_task()
        assert task is not None
        read = _Read(task, self._loop.time())
        self._set_timer()
        try:
            if self._free:
                self._free -= 1
            else:
                await self._wait(read)
            self._reads[read] = None
            try:
                data = await context.read()  # not `next_message`: each coroutine costs time
            finally:
                del self._reads[read]
                if self._waiting:
                    self._release()
                else:
                    self._free += 1
        except asyncio.CancelledError:
            if read.error is None or task.uncancel() > 0:
                raise
            raise read.error from None
        if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # as above
            return None
        if len(data) > self._max_bytes:
            raise ServeError(f"The message has more than {self._max_bytes} bytes.", status=413)
        received: bytes = data
        return received

    async def _wait(self, read: _Read) -> None:
        """Wait for a slot; no deadline, because `_check` ends it."""
        self._waiting[read] = slot = self._loop.create_future()
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self._release()
            raise
        finally:
            self._waiting.pop(read, None)
        read.since = self._loop.time()

    def _release(self) -> None:
        while self._waiting:
            _, slot = self._waiting.popitem()
            if not slot.done():
                slot.set_result(None)
                return
        self._free += 1

    def _set_timer(self) -> None:
        if self._timer is None:
            seconds = min(self._undisturbed, _SECONDS_BETWEEN_CHECKS)
            self._timer = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        """End what takes too long, and as many of the oldest reads as calls wait."""
        self._timer = None
        now, reads = self._loop.time(), tuple(self._reads)
        for read in (*reads, *self._waiting):
            if read.since + self._timeout <= now:
                read.end(f"No message has come within {self._timeout:g} s.", 504)
        for read in reads[: len(self._waiting)]:
            if read.since + self._undisturbed <= now:
                read.end("Other calls need the memory for this incomplete message.", 429)
        if self._reads or self._waiting:
            self._set_timer()
