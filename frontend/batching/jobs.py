"""A job, the unit of work of one request, and its answer.

A job is answered exactly once: `Job.resolve` and `Job.fail` do nothing after the first of them, nor
after `Job.cancel`. An answer in pieces counts as one: with its first piece comes a `Stream`.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import ClassVar

from marserve.backend.protocol import Buffer, Input, Prediction
from marserve.frontend.errors import ServeError


class StreamBroken(Exception):
    """The stream ended before the answer was complete."""


class Stream:
    """A streamed answer: the worker's side pushes pieces, the transport reads them.

    Slowing a worker down for one client would slow down the rest of its batch. So the pieces wait
    in memory for a slow client, and the stream of one that is too far behind is broken off.

    Attributes:
        first: The first piece; its status and headers are those of the answer.
        max_waiting_bytes: Bytes that may wait for the reader; 0 for any number.
        on_behind: Called when the stream is broken off because its reader is too slow. The reader
            is blocked in a write to the client, and would not notice otherwise.
        on_waiting: Called with how many bytes more wait for the reader, or, negative, less.
        on_end: Called then, too: see `Job.notify_end`.
        on_close: Called once, when the reader has taken the last piece or has left, with whether
            the answer was complete.
    """

    def __init__(self, first: Prediction) -> None:
        self.first = first
        self.max_waiting_bytes = 0
        self.on_behind: Callable[[], object] = lambda: None
        self.on_waiting: Callable[[int], object] = lambda _count: None
        self.on_close: Callable[[bool], object] = lambda _complete: None
        self.on_end: Callable[[], object] | None = None
        self._pieces: deque[Buffer] = deque([first.body])
        self._waiting_bytes = len(first.body)
        self._news: asyncio.Future[None] | None = None
        self._ended = False
        self._broken = ""
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether it is still read."""
        return not self._closed and not self._broken

    @property
    def is_complete(self) -> bool:
        """Whether the last piece was taken, and none will follow."""
        return self._ended and not self._pieces

    @property
    def waiting_bytes(self) -> int:
        """How many bytes wait for the reader."""
        return self._waiting_bytes

    def push(self, body: Buffer) -> None:
        """Add a piece."""
        if self._ended or self._closed or self._broken:
            return
        self._pieces.append(body)
        self._add_waiting(len(body))
        if 0 < self.max_waiting_bytes < self._waiting_bytes:
            self.fall_behind("the client is too slow")
        self._wake()

    def fall_behind(self, why: str) -> None:
        """Give up what waits for a reader that is too slow, and break the answer off."""
        self._pieces.clear()
        self._add_waiting(-self._waiting_bytes)
        self.break_off(why)
        self.on_behind()

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
        """Yield the pieces as they come; the caller closes the stream afterwards.

        No deadline is needed here: the worker's connection has one for each piece.

        Raises:
            StreamBroken: The answer was broken off.
        """
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._add_waiting(-len(piece))
                yield piece
            if self._broken:
                raise StreamBroken(self._broken)
            if self._ended:
                return
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def close(self) -> None:
        """Mark the stream as no longer read. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.on_close(self.is_complete)
            self._add_waiting(-self._waiting_bytes)
            if self.on_end is not None:
                self.on_end()

    def _add_waiting(self, count: int) -> None:
        self._waiting_bytes += count
        self.on_waiting(count)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


#: The answer to a request.
Answer = Prediction | Stream | ServeError
OnAnswer = Callable[[Answer], None]


class Group(Enum):
    """Kinds of requests; a batch has one kind, because handlers look at its first request only."""

    PREDICT = "predict"
    EXPLAIN = "explain"
    DESCRIBE = "describe"  # asks the handler about the model; each runs alone, without a window


class Priority(IntEnum):
    """How urgent a request is; a smaller number goes first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the server; moments are seconds on the monotonic clock.

    Attributes:
        input: What the client sent.
        arrived: Moment at which it was queued.
        on_answer: Called with the answer, once; must not raise. None once it has been called or
            the job was cancelled.
        group: Jobs share a batch with others of their group only.
        deadline: Moment after which the answer is useless.
        priority: How urgent it is.
        order: Its place in the queue, smallest first; set when it is queued.
        dispatched: Moment at which it was sent to a worker; None while it is queued.
        stream: The streamed answer; None until the first piece.
        on_end: See `notify_end`.
        crashes: How many workers died while they had it.
        is_suspected: Whether the same content has failed alone; it must not share a batch.
        is_row_of_list: Whether it came with others of its client's request, which are queued with
            it: then no fixed window is held open for it.
        length: How long its input is; set only where batches are formed by it.
    """

    is_row_of_list: ClassVar[bool] = False

    input: Input
    arrived: float
    on_answer: OnAnswer | None
    group: Group = Group.PREDICT
    deadline: float = field(default=math.inf, kw_only=True)
    priority: Priority = field(default=Priority.NORMAL, kw_only=True)
    order: float = field(default=0.0, init=False)
    dispatched: float | None = field(default=None, init=False)
    stream: Stream | None = field(default=None, init=False)
    on_end: Callable[[], object] | None = field(default=None, init=False)
    crashes: int = field(default=0, init=False)
    is_suspected: bool = field(default=False, init=False)
    length: float = field(init=False, repr=False)

    @property
    def is_open(self) -> bool:
        """Whether a client still waits for the answer, or for more of it."""
        if self.stream is not None:
            return self.stream.is_open
        return self.on_answer is not None

    def notify_end(self, on_end: Callable[[], object]) -> None:
        """Have ``on_end`` called when nobody waits for the answer, or more of it, any more.

        It takes the place of the one before; it may be called more than once.
        """
        self.on_end = on_end
        if self.stream is not None:
            self.stream.on_end = on_end

    def resolve(self, prediction: Prediction) -> None:
        """Answer with a prediction, or with the last piece of one."""
        if self.stream is not None:
            self.stream.push(prediction.body)
            self.stream.end()
        else:
            self.answer(prediction)

    def push(self, piece: Prediction) -> None:
        """Answer with a piece of a prediction; others follow."""
        if self.stream is not None:
            self.stream.push(piece.body)
        elif self.on_answer is not None:
            self.stream = Stream(piece)
            self.stream.on_end = self.on_end
            self.answer(self.stream)

    def fail(self, error: ServeError) -> None:
        """Answer with a failure; an answer that has begun is broken off."""
        if self.stream is not None:
            self.stream.break_off(error.message)
        else:
            self.answer(error)

    def cancel(self) -> None:
        """Stop waiting for the answer, or for the rest of a stream."""
        self.on_answer = None
        if self.stream is not None:
            self.stream.close()
        elif self.on_end is not None:
            self.on_end()

    def answer(self, answer: Answer) -> None:
        """Call ``on_answer``, unless the job is answered or cancelled already."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            if self.on_end is not None and type(answer) is not Stream:
                self.on_end()
            on_answer(answer)
