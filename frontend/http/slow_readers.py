"""Finds the clients that do not read what was written to them, and those that have left.

A client is checked while its write buffer is full, or while its connection closes after the last
write. Only the kernel counts the bytes that a client has read: with TLS, asyncio's transports hide
the bytes that are encrypted but not sent yet.
"""

import asyncio
import fcntl
import select
import socket
import struct
import sys
import termios
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marserve.frontend.http.client import ClientConnection

_TCP_INFO_BYTES = 256
_COUNTS = struct.Struct("@QQ")  # of bytes: acknowledged by the other machine, received from it
_COUNTS_AT = 120  # in `struct tcp_info` of Linux, from 4.1 on
_OUTSTANDING = struct.Struct("@i")
_LONGEST_PERIOD = 1.0


@dataclass(slots=True)
class _Progress:
    since: float
    read_before: int
    read: int
    moved: float  # when it last read something


class SlowReaders:
    """The clients of a listener that have not read everything yet.

    A client must read something within ``timeout`` seconds. For everything it has the same time,
    and a second for each ``rate`` bytes; 0 means no limit in total.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: float, rate: int) -> None:
        self._loop, self._timeout, self._rate = loop, timeout, rate
        self._progress: dict[ClientConnection, _Progress] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connection: "ClientConnection") -> None:
        """Check a client from now on."""
        if connection not in self._progress:
            now, read = self._loop.time(), bytes_read(connection.transport)
            self._progress[connection] = _Progress(now, read, read, now)
            self._set_timer()

    def forget(self, connection: "ClientConnection") -> None:
        """Stop checking a client that has read everything, or has left."""
        self._progress.pop(connection, None)

    def _set_timer(self) -> None:
        if self._timer is None:
            period = min(_LONGEST_PERIOD, self._timeout / 4)
            self._timer = self._loop.call_later(period, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for connection in list(self._progress):
            if self._is_slow(connection, now):
                self.forget(connection)
                connection.give_up()
            else:
                connection.check_unread()
        if self._progress:
            self._set_timer()

    def _is_slow(self, connection: "ClientConnection", now: float) -> bool:
        progress = self._progress[connection]
        read = bytes_read(connection.transport)
        if read != progress.read:
            progress.read, progress.moved = read, now
        if now - progress.moved >= self._timeout:
            return True
        if not self._rate:
            return False
        granted = self._timeout + (read - progress.read_before) / self._rate
        return now - progress.since >= granted


def bytes_read(transport: asyncio.Transport) -> int:
    """Return how many bytes a client has read; only differences are meaningful.

    For TCP these are the bytes that the other machine has acknowledged, which it does until its
    buffers are full. Elsewhere, and in sandboxes whose kernel does not count them, it is the
    negative number of bytes that are not sent yet.
    """
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:  # lost; with TLS, connection_lost follows a little later
        return -transport.get_write_buffer_size()
    try:
        if sys.platform == "linux" and connection.family != socket.AF_UNIX:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if len(info) >= _COUNTS_AT + _COUNTS.size:
                acked: int
                acked, received = _COUNTS.unpack_from(info, _COUNTS_AT)
                if received:  # there was a request, so they are counted
                    return acked
        packed = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_OUTSTANDING.size))
        outstanding: int = _OUTSTANDING.unpack(packed)[0]
    except OSError:
        outstanding = 0  # it is lost already
    return -(outstanding + transport.get_write_buffer_size())


class AbsentClients:
    """The connections of a listener that are not read at present; closed ones are aborted.

    Reading pauses while a request is answered, so that a client cannot fill the memory. The event
    loop then does not report a closed connection, and the request would run without a client.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._unread: set[asyncio.Transport] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, transport: asyncio.Transport) -> None:
        """Check a connection from now on."""
        self._unread.add(transport)
        if self._timer is None:
            self._timer = self._loop.call_later(_LONGEST_PERIOD, self._look)

    def forget(self, transport: asyncio.Transport) -> None:
        """Stop checking a connection that is read again, or has ended."""
        self._unread.discard(transport)

    def _look(self) -> None:
        self._timer = None
        for transport in [each for each in self._unread if _has_left(each)]:
            self.forget(transport)
            transport.abort()
        if self._unread:
            self._timer = self._loop.call_later(_LONGEST_PERIOD, self._look)


def _has_left(transport: asyncio.Transport) -> bool:
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:  # lost; with TLS, connection_lost follows a little later
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)  # errors are always reported
    return bool(poll.poll(0))
