"""Finds clients that have left while nothing is read from them.

A connection that has enough to do is not read, so that a client cannot fill the memory; but then
the event loop does not tell that the client is gone, and its request would run for nobody.
"""

import asyncio
import select
import socket

_PERIOD = 1.0  # seconds


class AbsentClients:
    """The clients of a listener that are not read at present; those that have left are aborted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._unread: set[asyncio.Transport] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, transport: asyncio.Transport) -> None:
        """Look at a client from now on."""
        self._unread.add(transport)
        if self._timer is None:
            self._timer = self._loop.call_later(_PERIOD, self._look)

    def forget(self, transport: asyncio.Transport) -> None:
        """The client is read again, or its connection has ended."""
        self._unread.discard(transport)

    def _look(self) -> None:
        self._timer = None
        for transport in [each for each in self._unread if _has_left(each)]:
            self.forget(transport)
            transport.abort()
        if self._unread:
            self._timer = self._loop.call_later(_PERIOD, self._look)


def _has_left(transport: asyncio.Transport) -> bool:
    """Whether the other end has hung up, or sends no more, which counts as the same."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:  # it is lost, which with TLS the protocol is told a little later
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)  # errors are always told
    return bool(poll.poll(0))
