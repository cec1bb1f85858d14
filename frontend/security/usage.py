"""The connections and the bytes in flight of the clients of a listener.

Bytes in flight are those of requests that are received or unanswered, of answers that their clients
have not read, and of intermediate results (`Holding`). An answer is never refused, but further
requests are. Up to 64 KiB per connection are not counted, so that the usual request costs no
counting. Clients of unix sockets have no address, and no limit per address applies to them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from marserve.frontend.errors import TooMuchInFlight

_UNCOUNTED_BYTES = 1 << 16


@dataclass(slots=True, eq=False, weakref_slot=True)
class ClientUsage:
    """The use of the connections from one address, which is empty for a unix socket."""

    address: str
    connections: int = 0
    bytes: int = 0


@dataclass(eq=False)
class Usage:
    """The use of all clients of a listener; 0 means no limit.

    ``on_limit`` is called with the name of a limit and a sentence for the log.
    """

    max_bytes: int = 0  # in flight, of all clients
    max_client_bytes: int = 0  # of one address
    on_limit: Callable[[str, str], object] = lambda _limit, _what: None
    bytes: int = field(default=0, init=False)
    #: Length up to which requests are not counted; 0 while answers exceed the limit.
    uncounted_bytes: int = field(default=_UNCOUNTED_BYTES, init=False)
    _clients: WeakValueDictionary[str, ClientUsage] = field(
        default_factory=WeakValueDictionary, init=False
    )

    @property
    def is_full(self) -> bool:
        """Whether the bytes in flight exceed the limit."""
        return 0 < self.max_bytes < self.bytes

    def share(self, client: ClientUsage) -> float:
        """Return the share of a client's limits that is used."""
        limits = (self.bytes, self.max_bytes), (client.bytes, self.max_client_bytes)
        return max((used / limit for used, limit in limits if limit), default=0.0)

    def client(self, address: str) -> ClientUsage:
        """Return the use of one address; the caller keeps it, and counts the connections."""
        client = self._clients.get(address) or ClientUsage(address)
        if address:
            self._clients[address] = client
        return client

    def hold(self, client: ClientUsage, count: int) -> None:
        """Count bytes of a request; TooMuchInFlight, and no count, if they would exceed a limit."""
        if limit := self.limit_of(client, count):
            origin = f" from {client.address}" if limit != "max_bytes_in_flight" else ""
            self.on_limit(limit, f"Requests{origin} are refused: {limit} allows no more bytes.")
            raise TooMuchInFlight(limit)
        self.add(client, count)

    def limit_of(self, client: ClientUsage, count: int) -> str:
        """Return the name of the limit that further bytes would exceed; empty for none."""
        if 0 < self.max_bytes < self.bytes + count:
            return "max_bytes_in_flight"
        if client.address and 0 < self.max_client_bytes < client.bytes + count:
            return "max_client_bytes_in_flight"
        return ""

    def add(self, client: ClientUsage, count: int) -> None:
        """Count bytes without a check; a negative number releases them."""
        client.bytes += count
        self.bytes += count
        self.uncounted_bytes = 0 if self.is_full else _UNCOUNTED_BYTES


@dataclass(slots=True, eq=False)
class Holding(AbstractContextManager["Holding"]):
    """The memory for one request beside its body and its answer, such as outputs of nodes."""

    usage: Usage = field(default_factory=Usage)
    client: ClientUsage = field(default_factory=partial(ClientUsage, ""))
    bytes: int = 0

    def hold(self, count: int) -> None:
        """Count bytes; raises as `Usage.hold` does."""
        self.usage.hold(self.client, count)
        self.bytes += count

    def release(self, count: int) -> None:
        """Count less."""
        self.usage.add(self.client, -count)
        self.bytes -= count

    def close(self, *_error: object) -> None:
        """Release all."""
        self.release(self.bytes)

    __exit__ = close
