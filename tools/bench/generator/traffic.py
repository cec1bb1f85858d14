"""The common part of closed and open loops: connections, timeouts, and an orderly end."""

import asyncio
import math
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle

from marserve.tools.bench.generator.connection import Connection, Connector
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.record import Record

#: Errors after which the load ends, because the server is gone.
_GONE = (ConnectionRefusedError, FileNotFoundError, socket.gaierror)
_RETRY_SECONDS = 0.05
_SILENCE = 2  # timeouts of a request without any answer, after which the load ends
_LONGEST_CHECK = 0.5  # seconds between checks for timeouts


class Traffic(ABC):
    """A load in progress; subclasses determine when requests are due.

    Args:
        load: The load.
        requests: The bytes of requests, sent in turn.
        destination: The server.
        clock: Returns the time in seconds.

    Attributes:
        record: The results so far.
        warm_up: Seconds from the start that are not measured.
    """

    def __init__(
        self,
        load: Load,
        requests: Sequence[bytes],
        destination: Destination,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record = Record()
        self.warm_up = load.warm_up
        self._load = load
        self._requests = cycle(requests)
        self._connector = Connector(destination, self, load.timeout)
        self._clock = clock
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._ended = asyncio.Event()
        self._silent_since = math.inf  # when the first request was due that got no answer in time

    @abstractmethod
    async def connect(self) -> None:
        """Open the first connections.

        Raises:
            OSError: A connection cannot be opened.
        """

    async def run(self, start: float) -> None:
        """Run the load from the moment ``start`` on, and wait for the last answer."""
        await asyncio.sleep(start - self._clock())
        watchdog = asyncio.create_task(self._watch())
        used = time.process_time()
        try:
            self._begin(start)
            await self._ended.wait()
            self.record.busy = (time.process_time() - used) / (self._clock() - start)
        finally:
            for task in (watchdog, *self._tasks):
                task.cancel()
            await asyncio.gather(watchdog, *self._tasks, return_exceptions=True)
            self._stop_timers()
            for connection in self._connections:
                connection.close()

    @abstractmethod
    def answered(self, connection: Connection, due: float, kind: str) -> None:
        """Receive an answer, as described at `Answers`."""

    @abstractmethod
    def failed(self, connection: Connection, due: float, kind: str) -> None:
        """Receive a failure, as described at `Answers`."""

    @abstractmethod
    def _begin(self, start: float) -> None:
        """Send the first requests."""

    def _stop_timers(self) -> None:  # noqa: B027  a closed loop has none
        """Stop the timers of due requests."""

    def _give_up_waiting(self, before: float) -> None:
        """Abort the requests that were due before a moment; after a long silence, end the load."""
        self._time_out(before)
        seconds = _SILENCE * self._load.timeout
        if self._clock() > self._silent_since + seconds:
            self._stop(f"it gave no answer for {seconds:g} s")
            self._time_out(math.inf)

    def _time_out(self, before: float) -> None:
        for connection in [item for item in self._connections if 0 < item.due < before]:
            self._silent_since = min(self._silent_since, connection.due)
            connection.abort("timeout")

    def _soon(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self) -> Connection | None:
        """Open another connection, with retries; return None if the load ends meanwhile.

        The load ends if the server is gone, or opens no connection within the timeout.
        """
        deadline = self._clock() + self._load.timeout
        while not self._ended.is_set():
            try:
                connection = await self._connector.open()
            except OSError as error:
                if isinstance(error, _GONE) or self._clock() > deadline:
                    self._stop(reason(error))
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self._connections.add(connection)
                return connection
        return None

    def _stop(self, why: str) -> None:
        self.record.stopped = self.record.stopped or why
        self._is_over = True
        self._ended.set()

    async def _watch(self) -> None:
        pause = min(_LONGEST_CHECK, self._load.timeout / 4)
        while True:
            await asyncio.sleep(pause)
            self._connections = {
                connection for connection in self._connections if not connection.is_closed
            }
            self._give_up_waiting(self._clock() - self._load.timeout)


def reason(error: OSError) -> str:
    """Return the system's message for a connection that could not be opened."""
    return (error.strerror or str(error) or type(error).__name__).lower()
