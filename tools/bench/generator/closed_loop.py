"""Closed loop: each client sends its next request when it has the answer to the last one.

It finds what a server can do at most; how long requests wait at a given load it cannot tell, for a
server that stalls is sent nothing meanwhile.

The clock starts with an answer and stops with an answer. So a server that answers by the batch is
measured over whole batches; by wall time alone a run of ten batches would be uncertain by one in
ten.
"""

import math

from marserve.tools.bench.generator.connection import Connection
from marserve.tools.bench.generator.traffic import Traffic

_SUCCESS = range(200, 300)


class ClosedLoop(Traffic):
    """See the module, and `Traffic`."""

    _began = 0.0
    _turn_at = math.inf
    _left = -1  # requests until the end; below 0 it is the clock that says when

    async def connect(self) -> None:
        """Open one connection per client."""
        assert self._load.clients is not None
        while len(self._connections) < self._load.clients:
            self._connections.add(await self._connector.open())

    def answered(self, connection: Connection, due: float, status: int) -> None:
        """Count it, and send the next."""
        now = self._clock()
        self._silent_since = math.inf
        if status in _SUCCESS:
            self.record.ended.append(now)
            self.record.latencies.append(now - due)
        else:
            self.record.fail(now, str(status))
        self._left -= 1
        if now >= self._turn_at or not self._left:
            self._turn(now)
        if self._is_over or connection.is_closed:
            self._leave(connection, now)
        else:
            connection.send(next(self._requests), now)

    def failed(self, connection: Connection, due: float, kind: str) -> None:  # noqa: ARG002  see Answers
        """Count it, and send the next on another connection."""
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
            if connection.is_closed:  # the server did not wait for us
                self._leave(connection, now)
            else:
                connection.send(next(self._requests), now)

    def _turn(self, now: float) -> None:
        """The warm-up is over, or the measurement, once the number of answers fits."""
        if self.record.count % self._load.step:
            self._turn_at = now  # looks again at the next answer
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
