"""Tells whoever has started the server how it fares, by the protocol of sd_notify(3).

That is systemd, for a service of ``Type=notify``, or the first process of a container
(`container_init`). Each message is one datagram to the socket that ``NOTIFY_SOCKET`` names, and
never waits: nobody else's trouble shall hold the server up.

The server is READY when its listeners are open, not when its models have loaded: a model that fails
must not keep the others from being served, and what depends on the service may connect. Whether
requests will be answered is what ``/ready`` says.
"""

import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Self

logger = logging.getLogger(__name__)

#: Says where messages go; a name that begins with @ is one of Linux's abstract names.
SOCKET_VARIABLE = "NOTIFY_SOCKET"
#: How often it wants to hear of us, in microseconds, and of which process.
WATCHDOG_VARIABLE, WATCHDOG_PID_VARIABLE = "WATCHDOG_USEC", "WATCHDOG_PID"


class ServiceManager:
    """What started this process, if it wants to be told.

    Args:
        address: The socket's path or abstract name; empty for nobody.
        watchdog_seconds: After how long without `alive` it ends the process; 0 for never.
    """

    def __init__(self, address: str = "", watchdog_seconds: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_seconds = watchdog_seconds if address else 0.0
        self._has_failed = False

    @classmethod
    def taken_from(cls, environ: MutableMapping[str, str]) -> Self:
        """Who is named in the environment, which loses the names: they are not for children."""
        address = environ.pop(SOCKET_VARIABLE, "")
        interval = environ.pop(WATCHDOG_VARIABLE, "")
        is_ours = environ.pop(WATCHDOG_PID_VARIABLE, "") in ("", str(os.getpid()))
        seconds = int(interval) / 1e6 if is_ours and interval.isdecimal() else 0.0
        return cls(address, seconds)

    def main_process(self, pid: int) -> None:
        """Say which process the server is."""
        self.tell(f"MAINPID={pid}")

    def ready(self, status: str) -> None:
        """Say that the server listens, with a sentence for who asks for its status."""
        self.tell("READY=1", f"STATUS={status}")

    def stopping(self, seconds: float) -> None:
        """Say that the server is about to stop, which may take so long."""
        self.tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}", "STATUS=Stopping.")

    def alive(self) -> None:
        """Say that the server does not hang."""
        self.tell("WATCHDOG=1")

    def tell(self, *lines: str) -> None:
        """Send a message of sd_notify, if anybody wants it."""
        if not self._address:
            return
        text = "\n".join(lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(text.encode(), self._address)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("Whoever started the server cannot be told %r: %s.", text, error)
