"""Finds the clients that do not take what was written to them.

Looked at are only connections that cannot write on, or are to be closed when all is written. What a
client has taken only the kernel knows: asyncio's transports hide, with TLS, what is encrypted and
not sent yet.
"""

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marserve.frontend.http.connections import Connection

_TCP_INFO_BYTES = 256
_COUNTS = struct.Struct("@QQ")  # of bytes: acknowledged by the other machine, received from it
_COUNTS_AT = 120  # in `struct tcp_info` of Linux, from 4.1 on
_OUTSTANDING = struct.Struct("@i")
_LONGEST_PERIOD = 1.0


@dataclass(slots=True)
class _Progress:
    """How much a client has taken when, and since when it is looked at."""

    since: float
    taken_before: int
    taken: int
    moved: float


class SlowReaders:
    """The clients of a listener that have not taken everything yet.

    Args:
        loop: Its clock is used.
        timeout: Seconds in which a client has to take something; and seconds for all there is, in
            addition to those that ``rate`` grants.
        rate: Bytes for which a client gets another second; 0 for no limit in total.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: float, rate: int) -> None:
        self._loop, self._timeout, self._rate = loop, timeout, rate
        self._progress: dict[Connection, _Progress] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connection: "Connection") -> None:
        """Look at a client from now on."""
        if connection not in self._progress:
            now, taken = self._loop.time(), bytes_taken(connection.transport)
            self._progress[connection] = _Progress(now, taken, taken, now)
            self._set_timer()

    def forget(self, connection: "Connection") -> None:
        """The client has taken everything, or has left."""
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

    def _is_slow(self, connection: "Connection", now: float) -> bool:
        progress = self._progress[connection]
        taken = bytes_taken(connection.transport)
        if taken != progress.taken:
            progress.taken, progress.moved = taken, now
        if now - progress.moved >= self._timeout:
            return True
        if not self._rate:
            return False
        granted = self._timeout + (taken - progress.taken_before) / self._rate
        return now - progress.since >= granted


def bytes_taken(transport: asyncio.Transport) -> int:
    """How many bytes a client has taken; only differences mean something.

    For TCP these are the bytes that the other machine has acknowledged, which it does as long as it
    has room for them. Elsewhere, and in sandboxes whose kernel does not count these, it is what is
    not outstanding any more.
    """
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:  # it is lost, which with TLS the protocol is told a little later
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
