"""Flow control of single answers: a handler waits while its client has not read enough.

One socket carries the answers of all requests of a worker. It cannot be paused for one of them, so
the frontend reports what is read of each (`protocol.PiecesRead`).
"""

import asyncio
import math


class StreamCredit:
    """Counts the unread bytes of an answer in pieces, in the thread of the event loop."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._unread = 0
        self._is_enough: asyncio.Event | None = None  # while something waits for it

    def add(self, count: int) -> None:
        """Count bytes that were sent; a negative number were read."""
        self._unread += count
        if self._is_enough is not None and self._unread <= self._window:
            self._is_enough.set()
            self._is_enough = None

    def close(self) -> None:
        """End all waits: the request is answered."""
        self._window = math.inf
        self.add(0)

    async def drain(self) -> None:
        """Wait while more bytes than the window are unread."""
        if self._unread > self._window:
            self._is_enough = self._is_enough or asyncio.Event()
            await self._is_enough.wait()  # no deadline: the frontend has one for the client
