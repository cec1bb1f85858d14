"""Long lists: the rows of a client's list are queued piece by piece if it has too many.

All such lists of one priority together have at most half of the capacity of the queue, so that
other requests find places, and take turns: a piece has the rows of one batch. A row counts as
arrived when it is queued. So requests that arrive meanwhile wait for at most half of a queue.

At least one row of these lists is always queued while there are any, also beyond the capacity: when
it is sent to a worker, the next piece is queued. A list that has ended is removed at once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from marserve.frontend.batching.jobs import Job, Priority
from marserve.frontend.errors import Overloaded, ServeError
from marserve.frontend.serving.predict_request import PendingRequests
from marserve.frontend.serving.request_rows import PendingRows

# Rows that are queued in one turn of the event loop, at least: some milliseconds.
_ROWS_PER_TURN = 256


class LongLists:
    """The lists of one model version that have rows which are not queued yet."""

    def __init__(self, pending: PendingRequests) -> None:
        self._pending = pending
        self._batcher, self._queue = pending.batcher, pending.batcher.queue
        #: The lists of each priority, that whose turn is next first.
        self._lists: list[deque[PendingRows]] = [deque() for _ in Priority]
        #: Their queued rows, and perhaps some that have left the queue.
        self._queued: list[deque[Job]] = [deque() for _ in Priority]
        self._is_woken = False
        self._loop = asyncio.get_running_loop()

    @property
    def unqueued(self) -> int:
        """Number of rows that are not queued yet."""
        return sum(rows.unqueued for lists in self._lists for rows in lists)

    def half(self, priority: Priority) -> int:
        """Return half of the capacity of a priority, at least 1."""
        return max(1, self._queue.capacity_of(priority) // 2)

    def is_full(self, priority: Priority) -> bool:
        """Return whether as many lists wait as the queue has capacity for requests."""
        return len(self._lists[priority]) >= self._queue.capacity_of(priority)

    def size_of_first_piece(self, priority: Priority) -> int:
        """Return how many rows of a new list may be queued at once; 0 while others have all."""
        free = min(self._room(priority), self._queue.free_capacity(priority))
        return max(0, min(free, self._batcher.size))

    def add(self, rows: PendingRows, first: Sequence[Job], priority: Priority) -> None:
        """Add a list whose first piece is queued."""
        self._queued[priority].extend(first)
        self._lists[priority].append(rows)
        self._pending.long_lists += 1
        self._batcher.on_sent = self._wake
        rows.on_end = lambda: self._remove(rows, priority)
        self._wake()

    def fail(self, make_error: Callable[[], ServeError]) -> None:
        """Fail all lists in the next turn of the event loop."""
        for lists in self._lists:
            for rows in lists:
                self._loop.call_soon(rows.expire, make_error())

    def _room(self, priority: Priority) -> int:
        queued = self._queued[priority]
        while queued and (queued[0].dispatched is not None or not queued[0].is_open):
            queued.popleft()
        return self.half(priority) - len(queued)

    def _wake(self) -> None:
        """Queue further rows in the next turn of the event loop."""
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._queue_pieces)

    def _queue_pieces(self) -> None:
        self._is_woken = False
        left = _ROWS_PER_TURN
        for priority in Priority:
            lists = self._lists[priority]
            while lists and (count := self._next_size(priority)) > 0:
                if left <= 0:
                    self._wake()
                    return
                left -= self._queue_piece(lists[0], count, priority)

    def _next_size(self, priority: Priority) -> int:
        size = self.size_of_first_piece(priority)
        return size if self._queued[priority] else max(1, size)

    def _queue_piece(self, rows: PendingRows, count: int, priority: Priority) -> int:
        """Queue a piece of the list whose turn it is; return its number of rows."""
        self._lists[priority].rotate(-1)
        jobs = rows.next_jobs(count, time.monotonic())
        self._queued[priority].extend(jobs)
        if not rows.unqueued:
            self._lists[priority].remove(rows)
            self._pending.long_lists -= 1
        try:
            self._batcher.put(*jobs, behind=rows.unqueued)
        except Overloaded as error:
            rows.expire(error)
        return len(jobs)

    def _remove(self, rows: PendingRows, priority: Priority) -> None:
        """Remove a list that has ended; its queued rows may have been the only ones."""
        if rows.unqueued:
            self._lists[priority].remove(rows)
            self._pending.long_lists -= 1
        if self._pending.long_lists:
            self._wake()
        else:
            self._batcher.on_sent = None
