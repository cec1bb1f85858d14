"""The connections and the bytes in flight of the clients of a listener.

Bytes in flight are those that requests keep in memory (`RequestMemory`), and answers that their
clients have not read. Up to 64 KiB per connection are not counted, so that the usual request costs
no counting. Clients of unix sockets have no address, and no limit per address applies to them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from marserve.frontend.aio.long_work import LongWork, Steps
from marserve.frontend.errors import NeverFits, TooMuchInFlight

T = TypeVar("T")

#: Of a connection.
UNCOUNTED_BYTES = 1 << 16


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
    long_work: LongWork = field(default_factory=LongWork)
    bytes: int = field(default=0, init=False)
    #: Length up to which requests are not counted; 0 while answers exceed the limit.
    uncounted_bytes: int = field(default=UNCOUNTED_BYTES, init=False)
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

    def hold(self, client: ClientUsage, count: int, own: int = 0) -> None:
        """Count bytes of a request; TooMuchInFlight, and no count, if they would exceed a limit.

        ``own`` bytes of the request are counted already; NeverFits if it exceeds a limit alone.
        """
        if limit := self.limit_of(client, count):
            self.check_alone(client, own + count)
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

    def check_alone(self, client: ClientUsage, count: int) -> None:
        """Raise NeverFits if the bytes of one request alone exceed a limit."""
        if 0 < self.max_bytes < count:
            raise NeverFits("max_bytes_in_flight", self.max_bytes)
        if client.address and 0 < self.max_client_bytes < count:
            raise NeverFits("max_client_bytes_in_flight", self.max_client_bytes)

    def add(self, client: ClientUsage, count: int) -> None:
        """Count bytes without a check; a negative number releases them."""
        client.bytes += count
        self.bytes += count
        self.uncounted_bytes = 0 if self.is_full else UNCOUNTED_BYTES


class RequestMemory:
    """The bytes that a request keeps in memory, from the first received to the last written one.

    A transport makes it and calls `end` when the answer is written, or the client has left. What
    takes memory in proportion to the request is counted here: the body as it arrives, what is made
    of it (`run`), outputs of nodes, answers to rows, and the answer. HTTP has one for each
    connection, whose requests follow one another.
    """

    __slots__ = ("_is_closed", "bytes", "client", "is_vital", "usage")

    def __init__(self, usage: Usage | None = None, client: ClientUsage | None = None) -> None:
        self.usage = Usage() if usage is None else usage
        self.client = ClientUsage("") if client is None else client
        self.bytes = 0
        #: Whether the request is served beyond the limits, with a small body and any answer.
        self.is_vital = False
        self._is_closed = False

    def hold(self, count: int) -> None:
        """Count bytes; TooMuchInFlight, and no count, if they would exceed a limit.

        Its subclass NeverFits, if they would also do so without any other request.
        """
        if self.is_vital and self.bytes + count <= UNCOUNTED_BYTES:
            self._add(count)
        elif not self._is_closed:
            self.usage.hold(self.client, count, self.bytes)
            self.bytes += count

    def hold_answer(self, count: int) -> None:
        """Count an answer, also beyond the limits; TooMuchInFlight if they are exceeded already."""
        if count > UNCOUNTED_BYTES:
            if not self.is_vital:
                self.hold(0)
            self._add(count)

    def check_alone(self, count: int) -> None:
        """Raise NeverFits if this number of bytes alone exceeds a limit."""
        self.usage.check_alone(self.client, count)

    def may_hold(self, count: int) -> bool:
        """Return whether the limits allow ``count`` more bytes."""
        return not self.usage.limit_of(self.client, count)

    def release(self, count: int) -> None:
        """Count less, because something is dropped before the end of the request."""
        self._add(-count)

    def _add(self, count: int) -> None:
        if not self._is_closed:
            self.usage.add(self.client, count)
            self.bytes += count

    async def run(self, steps: Steps[T]) -> T:
        """Run work whose size the client decides, in slices, and count what it adds to memory.

        Returns or raises what the work does; TooMuchInFlight if its memory would exceed a limit.
        """
        return await self.usage.long_work.run(steps, self._add if self.is_vital else self.hold)

    def end(self) -> None:
        """Release all bytes."""
        self.is_vital = False
        if self.bytes:
            self.release(self.bytes)

    def close(self) -> None:
        """Release all bytes, and count no more: the client has left."""
        self.end()
        self._is_closed = True
