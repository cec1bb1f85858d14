"""An answer that comes in pieces: the worker's side pushes them, the transport takes them out.

Nobody can hold a worker back for one client without holding back its batch-mates, so the pieces
wait in memory for a client that reads slowly; one that is too far behind loses its answer
(``max_stream_backlog``).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from marserve.backend.protocol import Buffer, Prediction


class StreamBroken(Exception):
    """The answer ends here, though it is not complete."""


class Stream:
    """The pieces of one answer.

    Args:
        first: The first piece; its status and headers are those of the answer.

    Attributes:
        max_waiting_bytes: Bytes that may wait for the reader; 0 for any number.
        on_behind: Called when the stream is broken off because its reader is too slow: that one
            waits for a client who takes nothing, and would not notice.
        on_close: Called once, when the reader has taken the last piece or has left, with whether
            the answer was complete.
    """

    def __init__(self, first: Prediction) -> None:
        self.first = first
        self.max_waiting_bytes = 0
        self.on_behind: Callable[[], object] = _nothing
        self.on_close: Callable[[bool], object] = _nothing
        self._pieces: deque[Buffer] = deque([first.body])
        self._waiting_bytes = len(first.body)
        self._news: asyncio.Future[None] | None = None
        self._ended = False
        self._broken = ""
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether anybody still reads it."""
        return not self._closed and not self._broken

    def push(self, body: Buffer) -> None:
        """Add a piece."""
        if self._ended or self._closed or self._broken:
            return
        self._pieces.append(body)
        self._waiting_bytes += len(body)
        if 0 < self.max_waiting_bytes < self._waiting_bytes:
            self._pieces.clear()
            self.break_off("the client is too slow")
            self.on_behind()
        self._wake()

    def end(self) -> None:
        """No more pieces follow."""
        self._ended = True
        self._wake()

    def break_off(self, why: str) -> None:
        """No more pieces follow, though the answer is not complete."""
        if not self._ended and not self._closed:
            self._broken = why
            self._wake()

    async def pieces(self) -> AsyncIterator[Buffer]:
        """Take the pieces as they come; whoever takes them closes the stream afterwards.

        No deadline: the worker has one for each piece, and breaks the stream off.

        Raises:
            StreamBroken: The answer was broken off.
        """
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._waiting_bytes -= len(piece)
                yield piece
            if self._broken:
                raise StreamBroken(self._broken)
            if self._ended:
                return
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def close(self) -> None:
        """Nobody reads it any more. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.on_close(self._ended and not self._pieces)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


def _nothing(*_: bool) -> None:
    """The default of the callbacks."""
