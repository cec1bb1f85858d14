"""Jobs, the units of work of requests, and their answers.

A job is answered exactly once: `Job.resolve` and `Job.fail` do nothing after the first call of
either, nor after `Job.cancel`. An answer in pieces counts as one: the first piece makes a `Stream`.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from marserve.backend.protocol import Buffer, Input, Prediction
from marserve.frontend.errors import ServeError
from marserve.frontend.telemetry.trace_context import RequestTrace

if TYPE_CHECKING:
    from marserve.frontend.batching.batches import Batch


#: Called with the number of bytes of an answer that were read, or dropped because nothing reads it,
#: since it last returned True.
OnRead = Callable[[int], bool]


class StreamBroken(Exception):
    """The stream ended before the answer was complete."""


class Stream:
    """A streamed answer: the worker's side pushes pieces, the transport reads them.

    A worker that waited for a slow client would delay the other requests of the batch. So pieces
    are buffered, and the stream of a client that is too far behind is broken off. Only coroutines
    can wait for single clients: ``on_read`` is for their worker.
    """

    def __init__(self, first: Prediction, on_read: OnRead = lambda _count: False) -> None:
        self.first = first  # its status and headers are those of the answer
        self.max_waiting_bytes = 0  # 0 for no limit
        #: Called when the stream is broken off because its reader is too slow, and perhaps blocked
        #: in a write to the client.
        self.on_behind: Callable[[], object] = lambda: None
        #: Called with each change of the number of buffered bytes.
        self.on_waiting: Callable[[int], object] = lambda _count: None
        #: Called once at the end, with whether the reader has taken the last piece, and why the
        #: answer was broken off, if it was.
        self.on_close: Callable[[bool, str], object] = lambda _complete, _broken: None
        self.on_end: Callable[[], object] | None = None
        self._pieces: deque[Buffer] = deque([first.body])
        self.waiting_bytes = len(first.body)
        self._on_read = on_read
        #: Bytes of the piece that the reader has taken last; those to call `_on_read` with.
        self._reading = self._read = 0
        #: A future: an asyncio.Event needs six more calls for each piece.
        self._changed: asyncio.Future[None] | None = None
        self._ended = False
        self._broken = ""
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether the transport still reads it."""
        return not self._closed and not self._broken

    @property
    def is_complete(self) -> bool:
        """Whether the last piece was taken."""
        return self._ended and not self._pieces

    @property
    def unread_bytes(self) -> int:
        """The bytes of its pieces for which ``on_read`` has not returned True."""
        return self.waiting_bytes + self._reading + self._read

    def push(self, body: Buffer) -> None:
        """Add a piece; does nothing after the end."""
        if self._ended or self._closed or self._broken:
            self._count_read(len(body))
            return
        self._pieces.append(body)
        self._add_waiting(len(body))
        if 0 < self.max_waiting_bytes < self.waiting_bytes:
            self.fall_behind("the client is too slow")
        self._wake()

    def fall_behind(self, why: str) -> None:
        """Discard the buffered pieces for a reader that is too slow, and break off the answer."""
        self._pieces.clear()
        self._drop_waiting()
        self.break_off(why)
        self.on_behind()

    def end(self) -> None:
        """Note that no more pieces follow."""
        self._ended = True
        self._wake()

    def break_off(self, why: str) -> None:
        """Note that no more pieces follow although the answer is not complete."""
        if not self._ended and not self._closed:
            self._broken = why
            self._wake()

    async def pieces(self) -> AsyncIterator[Buffer]:
        """Yield the pieces as they arrive; raises StreamBroken if the answer was broken off.

        A piece counts as read when the next one is requested. The caller closes the stream. The
        worker's connection has a deadline for each piece.
        """
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._add_waiting(-len(piece))
                self._reading = len(piece)
                yield piece
                self._count_read()
            if self._broken:
                raise StreamBroken(self._broken)
            if self._ended:
                return
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    def close(self) -> None:
        """Mark the stream as no longer read. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.on_close(self.is_complete, self._broken)
            self._drop_waiting()
            if self.on_end is not None:
                self.on_end()

    def _drop_waiting(self) -> None:
        count = self.waiting_bytes
        self._add_waiting(-count)
        self._count_read(count)

    def _count_read(self, dropped: int = 0) -> None:
        self._read += self._reading + dropped
        self._reading = 0
        if self._on_read(self._read):
            self._read = 0

    def _add_waiting(self, count: int) -> None:
        self.waiting_bytes += count
        self.on_waiting(count)

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


#: The answer to a request.
Answer = Prediction | Stream | ServeError
OnAnswer = Callable[[Answer], None]


class Group(Enum):
    """Kinds of requests; a batch has one kind, because handlers look at its first request only."""

    PREDICT = "predict"
    EXPLAIN = "explain"
    DESCRIBE = "describe"  # the handler describes the model; each runs alone, without a window


class Priority(IntEnum):
    """The urgency of a request; a smaller number is more urgent."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through the server; moments are seconds on the monotonic clock."""

    #: Whether the other jobs of its request are queued with it; then no fixed window is held open.
    is_row_of_list: ClassVar[bool] = False

    input: Input
    arrived: float  # when it was queued
    #: Called with the answer, once; must not raise. None after that, and after the job was
    #: cancelled.
    on_answer: OnAnswer | None
    group: Group = Group.PREDICT
    deadline: float = field(default=math.inf, kw_only=True)
    priority: Priority = field(default=Priority.NORMAL, kw_only=True)
    trace: RequestTrace | None = field(default=None, kw_only=True)
    order: float = field(default=0.0, init=False)  # by which the queue is sorted, smallest first
    dispatched: float | None = field(default=None, init=False)  # None while it is queued
    batch: "Batch | None" = field(default=None, init=False)  # the latest that it was sent in
    stream: Stream | None = field(default=None, init=False)
    #: The time lines of the calls that its handler has made; None without any.
    nested: Any = field(default=None, init=False)
    on_end: Callable[[], object] | None = field(default=None, init=False)
    crashes: int = field(default=0, init=False)  # workers that died while they had it
    #: Whether the same content has failed alone; then it must not share a batch.
    is_suspected: bool = field(default=False, init=False)
    length: float = field(init=False, repr=False)  # set only where batches are formed by it

    @property
    def is_recorded(self) -> bool:
        """Whether its spans are exported."""
        return self.trace is not None and self.trace.is_recorded

    @property
    def is_open(self) -> bool:
        """Whether a client still waits for the answer or the rest of it."""
        if self.stream is not None:
            return self.stream.is_open
        return self.on_answer is not None

    def notify_end(self, on_end: Callable[[], object]) -> None:
        """Call ``on_end`` when no client waits for the answer, or the rest of it, any more.

        It replaces an earlier one, and may be called more than once.
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

    def push(self, piece: Prediction, *on_read: OnRead) -> None:
        """Answer with a piece of a prediction; others follow, with the same ``on_read``."""
        if self.stream is not None:
            self.stream.push(piece.body)
            return
        self.stream = Stream(piece, *on_read)
        if self.on_answer is None:  # nothing reads it
            self.stream.close()
        else:
            self.stream.on_end = self.on_end
            self.answer(self.stream)

    def fail(self, error: ServeError) -> None:
        """Answer with a failure; a stream is broken off."""
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
