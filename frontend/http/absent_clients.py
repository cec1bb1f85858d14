"""Finds clients that have closed a connection which is not read at present.

Reading pauses while a request is answered, so that a client cannot fill the memory. The event loop
then does not report a closed connection, and the request would run without a client.
"""

import asyncio
import select
import socket

_PERIOD = 1.0  # seconds


class AbsentClients:
    """The connections of a listener that are not read at present; closed ones are aborted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._unread: set[asyncio.Transport] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, transport: asyncio.Transport) -> None:
        """Check a connection from now on."""
        self._unread.add(transport)
        if self._timer is None:
            self._timer = self._loop.call_later(_PERIOD, self._look)

    def forget(self, transport: asyncio.Transport) -> None:
        """Stop checking a connection that is read again, or has ended."""
        self._unread.discard(transport)

    def _look(self) -> None:
        self._timer = None
        for transport in [each for each in self._unread if _has_left(each)]:
            self.forget(transport)
            transport.abort()
        if self._unread:
            self._timer = self._loop.call_later(_PERIOD, self._look)


def _has_left(transport: asyncio.Transport) -> bool:
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:  # lost; with TLS, connection_lost follows a little later
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)  # errors are always reported
    return bool(poll.poll(0))
