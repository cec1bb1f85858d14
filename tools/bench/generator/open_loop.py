"""Open loop: requests are sent on a schedule, whether or not earlier ones were answered.

Latency counts from the moment a request was due. It includes the time a request waited because the
server stalled and all connections were in use (no coordinated omission: Gil Tene, "How NOT to
Measure Latency").

Timers of the event loop are unsuitable: uvloop's have a resolution of a millisecond, and it polls
during the last one, on processors that the server may need. The interval timer of the process wakes
it within about 20 microseconds and takes no processor time while it sleeps.
"""

import asyncio
import math
import signal
from collections import deque

from marserve.tools.bench.generator.arrivals import due_moments
from marserve.tools.bench.generator.connection import Connection
from marserve.tools.bench.generator.traffic import Traffic

_SHORTEST_TIMER = 1e-6  # seconds; 0 would disarm the timer


class OpenLoop(Traffic):
    """A load with a schedule. A process runs only one at a time, as it has one interval timer."""

    _in_flight = 0
    _opening = 0

    async def connect(self) -> None:
        """Compute the schedule, and open a first connection."""
        self._moments = iter(due_moments(self._load))
        connection = await self._connector.open()
        self._connections.add(connection)
        self._idle = [connection]
        self._backlog: deque[float] = deque()

    def answered(self, connection: Connection, due: float, kind: str) -> None:
        """Record the answer; the connection is free for the next request."""
        now = self._clock()
        self._silent_since = math.inf
        if due >= self._measured_from:
            self.record.end(now, due, kind)
        self._leave(connection)

    def failed(self, connection: Connection, due: float, kind: str) -> None:
        """Record the failure."""
        self._fail(due, kind)
        self._leave(connection)

    def _begin(self, start: float) -> None:
        self._start = start
        self._measured_from = start + self._load.warm_up
        self._next_due = start + next(self._moments)
        asyncio.get_running_loop().add_signal_handler(signal.SIGALRM, self._send_what_is_due)
        self._send_what_is_due()

    def _stop_timers(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGALRM)

    def _send_what_is_due(self) -> None:
        now = self._clock()
        while self._next_due <= now and not self._is_over:
            self._send(self._next_due, now)
            self._plan_next()
        if not self._is_over:
            wait = max(_SHORTEST_TIMER, self._next_due - self._clock())
            signal.setitimer(signal.ITIMER_REAL, wait)

    def _plan_next(self) -> None:
        self._next_due = self._start + next(self._moments, math.inf)
        self._is_over = self._next_due == math.inf

    def _send(self, due: float, now: float) -> None:
        self._in_flight += 1
        if due >= self._measured_from:
            self.record.lateness.append(now - due)
        while self._idle:
            connection = self._idle.pop()  # the newest: idle ones may be closed meanwhile
            if not connection.is_closed:
                connection.send(next(self._requests), due)
                return
            self._connections.discard(connection)
        self._backlog.append(due)
        if len(self._connections) + self._opening < self._load.max_connections:
            self._opening += 1
            self._soon(self._join())

    def _leave(self, connection: Connection) -> None:
        self._in_flight -= 1
        if not connection.is_closed:
            self._serve(connection)
        else:
            self._connections.discard(connection)
            if self._backlog:
                self._opening += 1
                self._soon(self._join())
        self._end_if_done()

    def _serve(self, connection: Connection) -> None:
        """Send the request that has waited longest, or add the connection to the idle ones."""
        if self._backlog:
            connection.send(next(self._requests), self._backlog.popleft())
        else:
            self._idle.append(connection)

    async def _join(self) -> None:
        connection = await self._connection()
        self._opening -= 1
        if connection is not None:
            self._serve(connection)

    def _give_up_waiting(self, before: float) -> None:
        super()._give_up_waiting(before)
        while self._backlog and self._backlog[0] < before:
            self._fail(self._backlog.popleft(), "not sent")
            self._in_flight -= 1
        self._end_if_done()

    def _fail(self, due: float, kind: str) -> None:
        if due >= self._measured_from:
            self.record.fail(self._clock(), kind)

    def _end_if_done(self) -> None:
        if self._is_over and not self._in_flight:
            self._ended.set()
