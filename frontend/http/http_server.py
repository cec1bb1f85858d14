"""The HTTP server of a listener: makes protocols of connections, and answers what aiohttp reads."""

import logging
from collections.abc import Callable

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http import HttpProcessingError

from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.http.limits import ConnectionLimits, Connections
from marserve.frontend.http.protocol import (
    CLOSING,
    CONNECTION_INFO,
    IDLE_SECONDS,
    LINGERING_SECONDS,
    Connection,
)
from marserve.frontend.http.requests import MAX_LENGTH_DIGITS, HttpRequest
from marserve.frontend.http.router import Router
from marserve.frontend.security.usage import Usage

logger = logging.getLogger(__name__)

_SHORT_BODY = 1 << 16


_DEFAULT_LIMITS = ConnectionLimits()


def _is_no_client_error(record: logging.LogRecord) -> bool:
    """Return False for errors of a client's bytes, with which clients could fill the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_aiohttp_logger = logging.getLogger(f"{__name__}.aiohttp")
_aiohttp_logger.addFilter(_is_no_client_error)


class HttpServer:
    """Makes the protocol of every connection of a listener, and ends all connections.

    ``on_limit`` is called with the name of a limit each time that clients reach it.
    """

    def __init__(
        self,
        router: Router,
        limits: ConnectionLimits = _DEFAULT_LIMITS,
        *,
        fast_path: bool = True,
        on_limit: Callable[[str], object] = lambda _limit: None,
        long_work: LongWork | None = None,
    ) -> None:
        self._router = router
        self._fast_path = fast_path
        self._connections = Connections(limits, on_limit, long_work or LongWork())
        self._aiohttp_server = web.Server(
            self._handle,
            access_log=None,
            auto_decompress=False,  # TorchServe passed bodies on as they came
            handler_cancellation=True,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGERING_SECONDS,
            logger=_aiohttp_logger,
        )

    @property
    def usage(self) -> Usage:
        """What the clients use."""
        return self._connections.usage

    def __call__(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(
            self._connections, self._router, self._aiohttp_server, fast_path=self._fast_path
        )

    def stop(self) -> None:
        """Admit no more clients, and close each connection with its next answer."""
        self._connections.is_stopping = True

    async def close(self, timeout: float) -> None:
        """End all connections; received requests have ``timeout`` seconds to be answered."""
        await self._connections.close(timeout)
        await self._aiohttp_server.shutdown(timeout)

    async def _handle(self, raw: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; called by aiohttp when it has read the head."""
        connection: Connection | None = raw.get_extra_info(CONNECTION_INFO)
        if connection is None or not connection.is_open:
            return _CLOSED  # the client has left
        if len(raw.headers.get("content-length", "")) > MAX_LENGTH_DIGITS:
            connection.refuse_unreadable(
                f"the Content-Length has more than {MAX_LENGTH_DIGITS} digits"
            )
            return _CLOSED
        if raw.version < HttpVersion10:
            connection.refuse_unreadable("only HTTP/1.1 and HTTP/1.0 are supported")
            return _CLOSED
        connection.begin_request()
        keep_alive = False
        try:
            request = HttpRequest(raw, connection)
            answer = await self._router.answer(request)
            keep_alive = await connection.send(
                answer,
                request.id,
                keep_alive=raw.keep_alive
                and not self._connections.is_stopping
                and _is_read(raw, answer.status)
                and _stays(raw, connection),
                chunked=raw.version >= HttpVersion11,
                with_body=raw.method != "HEAD",
            )
        except Exception:  # the last resort
            logger.exception("Cannot answer %s %s", raw.method, raw.raw_path)
            connection.transport.abort()
        finally:
            connection.end_request()
        return _KEPT if keep_alive else _CLOSED


def _is_read(raw: web.BaseRequest, status: int) -> bool:
    """Return whether the body is read, or so short that aiohttp reads the rest of it."""
    if status in CLOSING:
        return False
    # A client that waits for 100 (Continue) may not send the body.
    is_short = "expect" not in raw.headers and 0 < (raw.content_length or 0) <= _SHORT_BODY
    return is_short or raw.content.is_eof()


def _stays(raw: web.BaseRequest, connection: Connection) -> bool:
    """Return whether the connection may stay open although the request asked for an upgrade."""
    if "upgrade" not in raw.headers:
        return True
    return connection.heads.decline_upgrade(raw.content.total_bytes if raw.body_exists else 0)


class _Written(web.StreamResponse):
    """An answer that is written already."""

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
