"""Receives a large body into the memory where it stays, instead of in pieces that are joined.

While a body arrives, its `LargeBody` is the protocol of the transport, in place of the connection.
It reads exactly the body, so that the next request is the connection's again.
"""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marserve.frontend.http.protocol import Connection

# The smallest memory. It grows to at most so many times what has arrived, so that a client which
# sends little does not make the server use much, and by at most so many bytes, which are set to 0.
_MIN_BYTES = 1 << 16
_FACTOR = 32
_MAX_STEP = 1 << 25
_NOTHING = memoryview(b"")


class LargeBody(asyncio.BufferedProtocol):
    """The body of a plain request, of ``length`` bytes; ``first`` are those that have arrived."""

    def __init__(self, connection: "Connection", length: int, first: memoryview) -> None:
        self._connection = connection
        self._length = length
        self._memory = bytearray()
        self._filled = len(first)
        self._first = first
        self._allowed = 0  # counted as in flight
        self._failure: MemoryError | None = None
        self._loop = asyncio.get_running_loop()
        self._started = self._last = self._loop.time()

    def begin(self) -> bool:
        """Allocate memory; return False if the limits of bytes in flight do not allow it."""
        if not self._may_grow():
            return False
        self._memory = bytearray(self._allowed)
        self._memory[: self._filled] = self._first
        self._first = _NOTHING
        return True

    def _may_grow(self) -> bool:
        wanted = max(_MIN_BYTES, min(self._filled * _FACTOR, self._filled + _MAX_STEP))
        more = min(wanted, self._length) - self._allowed
        memory = self._connection.memory
        if not memory.may_hold(more):
            return False
        memory.hold(more)
        self._allowed += more
        return True

    def take(self) -> bytearray | memoryview:
        """Return what has arrived, and forget it, since uvloop keeps this object."""
        memory, self._memory = self._memory, bytearray()
        return memory if self._filled == len(memory) else memoryview(memory)[: self._filled]

    def seconds_left(self) -> float:
        """Return how long the next bytes, and all of them, may still take; 0 or less if late."""
        limits = self._connection.limits
        end = self._last
        if limits.body_rate:
            end = min(end, self._started + self._filled / limits.body_rate)
        return end + limits.body_timeout - self._loop.time()

    # Called by the event loop, as an asyncio.BufferedProtocol

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return the memory for the next bytes."""
        if self._filled == len(self._memory):
            try:
                self._memory.extend(bytes(self._allowed - self._filled))
            except MemoryError as error:  # the event loop would close the connection
                self._failure = error
                return memoryview(bytearray(1))
        return memoryview(self._memory)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Give the body to the connection when it is complete, or when it may not grow."""
        if self._failure is not None:
            self._connection.fail(self._failure)
            return
        self._filled += nbytes
        self._last = self._loop.time()
        if self._filled == self._length:
            self._connection.end_large(self.take())
        elif self._filled == self._allowed and not self._may_grow():
            self._connection.leave_to_aiohttp()

    def eof_received(self) -> bool | None:
        """As the connection."""
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        """As the connection."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """As the connection."""
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """As the connection."""
        self._connection.connection_lost(exc)
