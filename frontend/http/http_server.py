"""The server of a listener: a protocol for every connection, and a handler for aiohttp."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from aiohttp import HttpVersion11, web
from aiohttp.http import HttpProcessingError

from marserve.frontend.http.connections import CONNECTION_INFO, IDLE_SECONDS, Connection
from marserve.frontend.http.limits import ConnectionGate, ConnectionLimits
from marserve.frontend.http.router import HttpRequest, Router

logger = logging.getLogger(__name__)

# How long a client whose request was answered early (413) may go on sending before we hang up.
_LINGERING_SECONDS = 2.0
_DEFAULT_LIMITS = ConnectionLimits()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record is not about what aiohttp could not parse: clients could fill a log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_aiohttp_logger = logging.getLogger(f"{__name__}.aiohttp")
_aiohttp_logger.addFilter(_is_news)


class HttpServer:
    """Makes the protocol of every connection of a listener, and ends them all.

    Args:
        router: Answers requests.
        limits: What clients may hold.
        protocol: Makes the protocol of a connection: `Connection`, or `fast_path.FastConnection`
            where plain predictions are to be answered without aiohttp.
    """

    def __init__(
        self,
        router: Router,
        limits: ConnectionLimits = _DEFAULT_LIMITS,
        protocol: Callable[["HttpServer"], Connection] = Connection,
    ) -> None:
        self.router = router
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.is_stopping = False
        self._protocol = protocol
        self._gate = ConnectionGate(limits)
        self._connections: set[Connection] = set()
        self._idle = asyncio.Event()
        self._aiohttp = web.Server(
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

    def make_aiohttp_protocol(self) -> asyncio.Protocol:
        """Aiohttp's protocol for a connection."""
        return self._aiohttp()

    def admit(self, connection: Connection) -> bool:
        """Take a connection in, if there is a place for it."""
        if self.is_stopping or not self._gate.admits(connection.transport, len(self._connections)):
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self._connections.discard(connection)
        if not self._connections:
            self._idle.set()

    async def close(self, timeout: float) -> None:
        """End all connections, those whose requests are answered first.

        Args:
            timeout: Seconds that requests under way have to be answered.
        """
        self.is_stopping = True
        for connection in list(self._connections):
            connection.end()
        if self._connections:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._idle.wait()
        for connection in list(self._connections):
            connection.transport.abort()
        await self._aiohttp.shutdown(timeout)

    async def _handle(self, raw: web.BaseRequest) -> web.StreamResponse:
        """Answer a request that aiohttp has read; called by aiohttp."""
        connection: Connection | None = raw.get_extra_info(CONNECTION_INFO)
        if connection is None or not connection.is_open:
            return _CLOSED  # nobody is there any more
        connection.begin_request()
        keep_alive = False
        try:
            request = HttpRequest(raw, connection.transport, connection.peer, self.limits)
            answer = await self.router.answer(request)
            keep_alive = await connection.send(
                answer,
                request.id,
                keep_alive=raw.keep_alive and not self.is_stopping,
                chunked=raw.version >= HttpVersion11,
                with_body=raw.method != "HEAD",
            )
        except Exception:  # the last resort
            logger.exception("Cannot answer %s %s", raw.method, raw.raw_path)
            connection.transport.abort()
        finally:
            connection.end_request()
        return _KEPT if keep_alive else _CLOSED


class _Written(web.StreamResponse):
    """What aiohttp is told of an answer that is written already."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._stays = keep_alive

    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays."""
        return self._stays

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is left to be written."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to be written."""


_KEPT, _CLOSED = _Written(keep_alive=True), _Written(keep_alive=False)
