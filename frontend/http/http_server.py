"""The HTTP server of a listener: admits connections, has their requests answered, and ends them.

Clients could exhaust a server with requests that never end, answers that they do not read
(`slow_readers`), and more of both than there is memory (`usage`) or are file descriptors for. So
heads, bodies and answers have deadlines, and connections are refused while there are descriptors
left for everything else (`descriptors`).
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import HttpVersion11, web
from aiohttp.http import HttpProcessingError

from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.http.absent_clients import AbsentClients
from marserve.frontend.http.connections import CONNECTION_INFO, IDLE_SECONDS, Connection
from marserve.frontend.http.descriptors import CERTAIN_CONNECTIONS, is_reserved
from marserve.frontend.http.forms import FormLimits
from marserve.frontend.http.router import HttpRequest, Router
from marserve.frontend.http.slow_readers import SlowReaders
from marserve.frontend.security.usage import Usage

logger = logging.getLogger(__name__)

# How long a client whose request was answered early (413) may go on sending before we hang up.
_LINGERING_SECONDS = 2.0
_SECONDS_BETWEEN_WARNINGS = 60.0


@dataclass(frozen=True)
class ConnectionLimits:
    """What the clients of one listener may use.

    Attributes:
        head_timeout: Seconds for the head of a request, from the connection's beginning or from the
            head's first byte.
        body_timeout: Seconds in which some of a body has to come; and seconds for all of it, in
            addition to those that ``body_rate`` grants.
        body_rate: Bytes for which a body gets another second; 0 for no limit in total.
        write_timeout: Seconds in which a client has to take some of an answer that waits for it;
            and seconds for all of it, in addition to those that ``write_rate`` grants.
        write_rate: Bytes for which a client gets another second; 0 for no limit in total.
        max_connections: Open at the same time; 0 leaves it to the file descriptors.
        max_client_connections: The same, from one address; 0 for any number.
        max_bytes_in_flight: Of requests and answers (`usage`); 0 for any number.
        max_client_bytes_in_flight: The same, from one address; 0 for any number.
        forms: What a form may have.
        listeners: The number of HTTP listeners of the server, which share its file descriptors.
        has_grpc: Whether gRPC listeners share them as well.
    """

    head_timeout: float = 60.0
    body_timeout: float = 60.0
    body_rate: int = 1000
    write_timeout: float = 60.0
    write_rate: int = 1000
    max_connections: int = 0
    max_client_connections: int = 0
    max_bytes_in_flight: int = 0
    max_client_bytes_in_flight: int = 0
    forms: FormLimits = field(default_factory=FormLimits)
    listeners: int = 1
    has_grpc: bool = False


_DEFAULT_LIMITS = ConnectionLimits()


def _is_no_client_error(record: logging.LogRecord) -> bool:
    """Whether aiohttp logs something else than garbage, with which clients could fill a log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_aiohttp_logger = logging.getLogger(f"{__name__}.aiohttp")
_aiohttp_logger.addFilter(_is_no_client_error)


class HttpServer:
    """Makes the protocol of every connection of a listener, and ends them all.

    Args:
        router: Answers requests.
        limits: What clients may use.
        on_limit: Called with the name of a limit each time that clients reach it.
        protocol: `Connection`, or `fast_path.FastConnection` to answer plain predictions without
            aiohttp.
    """

    def __init__(
        self,
        router: Router,
        limits: ConnectionLimits = _DEFAULT_LIMITS,
        protocol: Callable[["HttpServer"], Connection] = Connection,
        on_limit: Callable[[str], object] = lambda _limit: None,
    ) -> None:
        self.router = router
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.is_stopping = False
        self.long_work = LongWork()
        self.usage = Usage(
            limits.max_bytes_in_flight, limits.max_client_bytes_in_flight, self.note_limit
        )
        self.slow_readers = SlowReaders(self.loop, limits.write_timeout, limits.write_rate)
        self.absent_clients = AbsentClients(self.loop)
        self._protocol = protocol
        self._on_limit = on_limit
        self._next_warnings: dict[str, float] = {}
        self._connections: set[Connection] = set()
        self._idle = asyncio.Event()
        #: Makes aiohttp's protocol for a connection.
        self.make_aiohttp_protocol = web.Server(
            self._handle,
            access_log=None,
            auto_decompress=False,  # TorchServe passed bodies on as they came
            handler_cancellation=True,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=_LINGERING_SECONDS,
            logger=_aiohttp_logger,
        )

    def __call__(self) -> Connection:
        """The protocol of a new connection."""
        return self._protocol(self)

    def admit(self, connection: Connection, descriptor: int) -> bool:
        """Add a connection, if the limits allow one more."""
        if self.is_stopping:
            return False
        count, client, limits = len(self._connections), connection.client, self.limits
        if 0 < limits.max_connections <= count:
            limit = "max_connections"
            reason = f"{count} are open, as many as max_connections allows"
        elif client.address and 0 < limits.max_client_connections <= client.connections:
            limit = "max_client_connections"
            reason = f"{client.connections} from {client.address} are open"
        elif count >= CERTAIN_CONNECTIONS and is_reserved(
            descriptor, limits.listeners, has_grpc=limits.has_grpc
        ):
            limit = "file descriptors"
            reason = f"{count} are open here, and file descriptors run short (ulimit -n)"
        else:
            self._connections.add(connection)
            client.connections += 1
            return True
        self.note_limit(limit, f"New connections are refused: {reason}.")
        return False

    def note_limit(self, limit: str, what: str) -> None:
        """Count that clients have reached a limit, and log what happened, now and then."""
        self._on_limit(limit)
        now = time.monotonic()
        if now >= self._next_warnings.get(limit, -math.inf):
            self._next_warnings[limit] = now + _SECONDS_BETWEEN_WARNINGS
            logger.warning("%s", what)

    def remove(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self._connections.discard(connection)
        connection.client.connections -= 1
        if not self._connections:
            self._idle.set()

    async def close(self, timeout: float) -> None:
        """End all connections; requests that have come get ``timeout`` seconds to be answered."""
        self.is_stopping = True
        for connection in list(self._connections):
            connection.end()
        if self._connections:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._idle.wait()
        for connection in list(self._connections):
            connection.transport.abort()
        await self.make_aiohttp_protocol.shutdown(timeout)

    async def _handle(self, raw: web.BaseRequest) -> web.StreamResponse:
        """Answer a request that aiohttp has read; called by aiohttp."""
        connection: Connection | None = raw.get_extra_info(CONNECTION_INFO)
        if connection is None or not connection.is_open:
            return _CLOSED  # the client has left
        connection.begin_request()
        keep_alive = False
        try:
            request = HttpRequest(raw, connection)
            answer = await self.router.answer(request)
            keep_alive = await connection.send(
                answer,
                request.id,
                keep_alive=raw.keep_alive and not self.is_stopping and _stays(raw, connection),
                chunked=raw.version >= HttpVersion11,
                with_body=raw.method != "HEAD",
            )
        except Exception:  # the last resort
            logger.exception("Cannot answer %s %s", raw.method, raw.raw_path)
            connection.transport.abort()
        finally:
            connection.end_request()
        return _KEPT if keep_alive else _CLOSED


def _stays(raw: web.BaseRequest, connection: Connection) -> bool:
    """Whether the connection may stay although the request asked for another protocol."""
    if "upgrade" not in raw.headers:
        return True
    return connection.decline_upgrade(raw.content.total_bytes if raw.body_exists else 0)


class _Written(web.StreamResponse):
    """Stands for an answer that is written already; aiohttp learns whether the connection stays."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._stays = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._stays

    async def prepare(self, request: web.BaseRequest) -> None:
        pass

    async def write_eof(self, data: bytes = b"") -> None:
        pass


_KEPT, _CLOSED = _Written(keep_alive=True), _Written(keep_alive=False)
