"""Closed loop: each client sends its next request when it has the answer to the last one.

It measures the maximum throughput, not the waiting times at a given load: a server that stalls
receives no requests meanwhile.

The measurement starts and ends with an answer, so a server that answers in batches is measured over
whole batches; by wall time alone, a run of ten batches would have an error of up to a tenth.
"""

import math

from marserve.tools.bench.generator.connection import Connection
from marserve.tools.bench.generator.traffic import Traffic


class ClosedLoop(Traffic):
    """A load with a fixed number of clients, each with one request in flight."""

    _began = 0.0
    _turn_at = math.inf
    _left = -1  # requests until the end; negative if the clock ends the run

    async def connect(self) -> None:
        """Open one connection per client."""
        assert self._load.clients is not None
        while len(self._connections) < self._load.clients:
            self._connections.add(await self._connector.open())

    def answered(self, connection: Connection, due: float, kind: str) -> None:
        """Record the answer, and send the next request."""
        now = self._clock()
        self._silent_since = math.inf
        self.record.end(now, due, kind)
        self._left -= 1
        if now >= self._turn_at or not self._left:
            self._turn(now)
        if self._is_over or connection.is_closed:
            self._leave(connection, now)
        else:
            connection.send(next(self._requests), now)

    def failed(self, connection: Connection, due: float, kind: str) -> None:  # noqa: ARG002  from Answers
        """Record the failure, and send the next request on another connection."""
        now = self._clock()
        self.record.fail(now, kind)
        self._left -= 1
        if now >= self._turn_at or not self._left:
            self._turn(now)
        self._leave(connection, now)

    def _begin(self, start: float) -> None:
        now = self._clock()
        self._turn_at = start + self._load.warm_up
        for connection in [*self._connections]:
            if connection.is_closed:  # closed by the server before the start
                self._leave(connection, now)
            else:
                connection.send(next(self._requests), now)

    def _turn(self, now: float) -> None:
        """Start or end the measurement if the number of answers is a multiple of the step."""
        if self.record.count % self._load.step:
            self._turn_at = now  # check again at the next answer
            return
        if self._began:
            self._is_over = True
        else:
            self._began = now
            self._turn_at = math.inf if self._load.seconds is None else now + self._load.seconds
            self._left = -1 if self._load.requests is None else self._load.requests

    def _leave(self, connection: Connection, now: float) -> None:
        if connection.is_closed:
            self._connections.discard(connection)
            if not self._is_over:
                self._soon(self._return(now))
        if self._is_over and not any(item.due for item in self._connections):
            self._ended.set()

    async def _return(self, due: float) -> None:
        connection = await self._connection()
        if connection is not None and not self._is_over:
            connection.send(next(self._requests), due)
