"""What the clients of a listener may hold: time, connections, file descriptors.

Two things wear a server down without a single request: clients that never finish one, and more
clients than there are file descriptors. So heads and bodies have deadlines; and where descriptors
run short, new connections are refused while there are still some left for workers, archives and
logs. Each listener keeps a few places, so that a flood at one does not lock the operator out of
another.
"""

import asyncio
import logging
import resource
import time
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# Descriptors that connections leave to everything else.
_SPARE_DESCRIPTORS = 64
# So many connections a listener always takes, out of the spare descriptors.
_RESERVED_PLACES = 8
_WARNING_SECONDS = 60.0


@dataclass(frozen=True)
class ConnectionLimits:
    """What the clients of one listener may hold.

    Attributes:
        head_timeout: Seconds for the head of a request, from the connection's first moment or from
            the head's first byte.
        body_timeout: Seconds in which some of a body has to come; and seconds for all of it, beside
            those that ``body_rate`` grants.
        body_rate: Bytes for which a body gets another second; 0 for as long as it takes.
        max_connections: Open at the same time; 0 leaves it to the file descriptors.
    """

    head_timeout: float = 60.0
    body_timeout: float = 60.0
    body_rate: int = 1000
    max_connections: int = 0


class ConnectionGate:
    """Decides whether a listener takes one more connection.

    Args:
        limits: Of the listener.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._warned = -_WARNING_SECONDS

    def admits(self, transport: asyncio.BaseTransport, count: int) -> bool:
        """Whether there is a place for a connection beside ``count`` others."""
        limit = self._limits.max_connections
        if limit and count >= limit:
            self._warn(f"{count} are open, as many as max_connections allows")
        elif count >= _RESERVED_PLACES and _has_spare_descriptor(transport):
            self._warn(f"{count} are open here, and file descriptors run short (ulimit -n)")
        else:
            return True
        return False

    def _warn(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._warned >= _WARNING_SECONDS:
            self._warned = now
            logger.warning("New connections are refused: %s.", reason)


def _has_spare_descriptor(transport: asyncio.BaseTransport) -> bool:
    """Whether a connection has one of the descriptors that are to be spared.

    The system gives out the lowest free number, so the number of a new one tells how many are in
    use, by whatever; nobody has to count.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return False
    number: int = transport.get_extra_info("socket").fileno()
    return number >= soft - min(_SPARE_DESCRIPTORS, soft // 4)
