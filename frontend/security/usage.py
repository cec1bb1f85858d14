"""What the clients of a listener use: connections, and memory for bytes in flight.

In flight are the bytes of requests that are being received or wait for their answer, of answers
that wait for their clients to read them, and of what an answer is made of (`Holding`). An answer is
never refused; but where too much is in flight, further requests are, and requests whose answers
are being made fail. Not counted are up to 64 KiB per connection, so that the usual request costs no
counting.

Clients at unix sockets have no address, and share no limit of one.
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
    """What the connections from one address use; the address is empty at a unix socket."""

    address: str
    connections: int = 0
    bytes: int = 0


@dataclass(eq=False)
class Usage:
    """What all clients of a listener use.

    Attributes:
        max_bytes: In flight, of all clients; 0 for any number.
        max_client_bytes: In flight, from one address; 0 for any number.
        on_limit: Called with the name of a limit and a sentence for the log.
        bytes: In flight now.
        uncounted_bytes: Requests that are not longer need not be counted while they wait for their
            answer; none while more is in flight than allowed, as answers may be.
    """

    max_bytes: int = 0
    max_client_bytes: int = 0
    on_limit: Callable[[str, str], object] = lambda _limit, _what: None
    bytes: int = field(default=0, init=False)
    uncounted_bytes: int = field(default=_UNCOUNTED_BYTES, init=False)
    _clients: WeakValueDictionary[str, ClientUsage] = field(
        default_factory=WeakValueDictionary, init=False
    )

    @property
    def is_full(self) -> bool:
        """Whether more is in flight than allowed."""
        return 0 < self.max_bytes < self.bytes

    def share(self, client: ClientUsage) -> float:
        """The share of the bytes in flight that this client may add to which are there now."""
        limits = (self.bytes, self.max_bytes), (client.bytes, self.max_client_bytes)
        return max((used / limit for used, limit in limits if limit), default=0.0)

    def client(self, address: str) -> ClientUsage:
        """What one client uses, as long as it is referred to; the caller counts its connections."""
        client = self._clients.get(address) or ClientUsage(address)
        if address:
            self._clients[address] = client
        return client

    def hold(self, client: ClientUsage, count: int) -> None:
        """Count bytes of a request.

        Raises:
            TooMuchInFlight: There would be more than allowed; then they are not counted.
        """
        if limit := self.limit_of(client, count):
            origin = f" from {client.address}" if limit != "max_bytes_in_flight" else ""
            self.on_limit(limit, f"Requests{origin} are refused: {limit} allows no more bytes.")
            raise TooMuchInFlight(limit)
        self.add(client, count)

    def limit_of(self, client: ClientUsage, count: int) -> str:
        """The name of the limit that so many bytes more would exceed; empty for none."""
        if 0 < self.max_bytes < self.bytes + count:
            return "max_bytes_in_flight"
        if client.address and 0 < self.max_client_bytes < client.bytes + count:
            return "max_client_bytes_in_flight"
        return ""

    def add(self, client: ClientUsage, count: int) -> None:
        """Count bytes, whatever there are; less, if it is negative."""
        client.bytes += count
        self.bytes += count
        self.uncounted_bytes = 0 if self.is_full else _UNCOUNTED_BYTES


@dataclass(slots=True, eq=False)
class Holding(AbstractContextManager["Holding"]):
    """What is in memory for one request beside its body and its answer, such as outputs of nodes.

    At the end of a ``with`` block all is released.
    """

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
