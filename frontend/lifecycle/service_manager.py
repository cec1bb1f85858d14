"""Reports the state of the server to the process that started it, as in sd_notify(3).

That process is systemd, for a service of ``Type=notify``, or the first process of a container
(`container_init`). Sending never waits for the receiver.

The server is READY when its listeners are open, not when its models have loaded: a model that fails
must not keep the others from being served.
"""

import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Self

logger = logging.getLogger(__name__)

#: The socket's path; with @ in front, an abstract name of Linux.
SOCKET_VARIABLE = "NOTIFY_SOCKET"
#: The watchdog's interval in microseconds, and the process that it watches.
WATCHDOG_VARIABLE, WATCHDOG_PID_VARIABLE = "WATCHDOG_USEC", "WATCHDOG_PID"
_MAX_DIGITS = 20  # of a number of 64 bits


class ServiceManager:
    """The process that started this one, if it receives messages.

    It ends this process after ``watchdog_seconds`` without `alive`; 0 for never.
    """

    def __init__(self, address: str = "", watchdog_seconds: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_seconds = watchdog_seconds if address else 0.0
        self._has_failed = False

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Self:
        """Read the variables and remove them, so that children do not inherit them."""
        address = environ.pop(SOCKET_VARIABLE, "")
        interval = environ.pop(WATCHDOG_VARIABLE, "")
        is_ours = environ.pop(WATCHDOG_PID_VARIABLE, "") in ("", str(os.getpid()))
        is_number = interval.isdecimal() and len(interval) <= _MAX_DIGITS
        seconds = int(interval) / 1e6 if is_ours and is_number else 0.0
        return cls(address, seconds)

    def main_process(self, pid: int) -> None:
        """Report the process id of the server."""
        self.send(f"MAINPID={pid}")

    def ready(self, status: str) -> None:
        """Report that the server listens, with a sentence for ``systemctl status``."""
        self.send("READY=1", f"STATUS={status}")

    def stopping(self, seconds: float) -> None:
        """Report that the server stops, within ``seconds``."""
        self.send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}", "STATUS=Stopping.")

    def alive(self) -> None:
        """Report that the server does not hang."""
        self.send("WATCHDOG=1")

    def send(self, *lines: str) -> None:
        """Send a message of sd_notify, if there is a receiver."""
        if not self._address:
            return
        text = "\n".join(lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(text.encode(), self._address)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("NOTIFY_SOCKET: %r cannot be sent: %s.", text, error)
