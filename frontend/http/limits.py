"""The limits of the clients of a listener, and the connections that they admit.

A connection is one descriptor. Each HTTP listener always has eight connections, so that a flood at
one does not lock the operator out of another. grpc accepts connections up to its share, a quarter
of all descriptors, and does not see other use. Further HTTP connections leave these free, and some
for workers, archives and logs.
"""

import asyncio
import logging
import math
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.http.forms import FormLimits
from marserve.frontend.http.slow_readers import AbsentClients, SlowReaders
from marserve.frontend.security.usage import Usage

if TYPE_CHECKING:
    from marserve.frontend.http.client import ClientConnection

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_WARNINGS = 60.0
# Connections that each HTTP listener may always have.
_CERTAIN_CONNECTIONS = 8
# Descriptors for workers, archives and logs; fewer where the limit is low.
_SPARE_DESCRIPTORS = 64
_MAX_DESCRIPTORS = 1 << 20


@dataclass(frozen=True)
class ConnectionLimits:
    """What the clients of one listener may use; times are in seconds, 0 means no limit.

    A body must arrive, and an answer be read, within its timeout and a second for each ``rate``
    bytes; also the next part of either must come within the timeout.
    """

    head_timeout: float = 60.0  # from the first byte, or the start of the connection
    body_timeout: float = 60.0
    body_rate: int = 1000
    write_timeout: float = 60.0
    write_rate: int = 1000
    max_connections: int = 0
    max_client_connections: int = 0  # from one address
    max_bytes_in_flight: int = 0
    max_client_bytes_in_flight: int = 0
    forms: FormLimits = field(default_factory=FormLimits)
    listeners: int = 1  # HTTP listeners of the server, which share its descriptors
    has_grpc: bool = False  # whether gRPC listeners share them as well


class Connections:
    """The open connections of a listener, and what they share."""

    def __init__(
        self, limits: ConnectionLimits, on_limit: Callable[[str], object], long_work: LongWork
    ) -> None:
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.is_stopping = False
        self.usage = Usage(
            limits.max_bytes_in_flight,
            limits.max_client_bytes_in_flight,
            self.note_limit,
            long_work,
        )
        self.slow_readers = SlowReaders(self.loop, limits.write_timeout, limits.write_rate)
        self.absent_clients = AbsentClients(self.loop)
        self._on_limit = on_limit
        self._next_warnings: dict[str, float] = {}
        self._open: set[ClientConnection] = set()
        self._none_open = asyncio.Event()

    def admit(self, connection: "ClientConnection", descriptor: int) -> bool:
        """Add a connection if the limits allow one more, and return whether they do."""
        if self.is_stopping:
            return False
        count, client, limits = len(self._open), connection.client, self.limits
        if 0 < limits.max_connections <= count:
            limit = "max_connections"
            reason = f"{count} are open, as many as max_connections allows"
        elif client.address and 0 < limits.max_client_connections <= client.connections:
            limit = "max_client_connections"
            reason = f"{client.connections} from {client.address} are open"
        elif count >= _CERTAIN_CONNECTIONS and _is_reserved(descriptor, limits):
            limit = "file descriptors"
            reason = f"{count} are open here, and file descriptors run short (ulimit -n)"
        else:
            self._open.add(connection)
            client.connections += 1
            return True
        self.note_limit(limit, f"New connections are refused: {reason}.")
        return False

    def remove(self, connection: "ClientConnection") -> None:
        """Remove a connection that was admitted and has ended."""
        self._open.discard(connection)
        connection.client.connections -= 1
        if not self._open:
            self._none_open.set()

    def note_limit(self, limit: str, message: str) -> None:
        """Count that clients have reached a limit, and log it at most once a minute."""
        self._on_limit(limit)
        now = time.monotonic()
        if now >= self._next_warnings.get(limit, -math.inf):
            self._next_warnings[limit] = now + _SECONDS_BETWEEN_WARNINGS
            logger.warning("%s", message)

    async def close(self, timeout: float) -> None:
        """End all connections; received requests have ``timeout`` seconds to be answered."""
        self.is_stopping = True
        for connection in list(self._open):
            connection.end()
        if self._open:
            self._none_open.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._none_open.wait()
        for connection in list(self._open):
            connection.transport.abort()


def grpc_descriptors() -> int:
    """Return the number of connections that all gRPC listeners may have; 0 for any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else soft // 4


def raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(ValueError, OSError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _is_reserved(descriptor: int, limits: ConnectionLimits) -> bool:
    """Return whether the descriptor of a connection is one of those left to everything else.

    The system assigns the lowest free number, so the number of a new descriptor is about the number
    of those in use. The limit may be changed from outside while the server runs.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return False
    reserve = min(_SPARE_DESCRIPTORS, soft // 4) + _CERTAIN_CONNECTIONS * limits.listeners
    if limits.has_grpc:
        reserve += grpc_descriptors()
    return descriptor >= soft - reserve
