"""A listener's door: finds the route, checks the token, and turns whatever happens into one answer.

It is an aiohttp low-level server rather than an application: TorchServe's paths are not aiohttp's
(percent-decoded before they are split, trailing slashes dropped, every method served), and what an
application does per request (matching, signals, middlewares) costs as much as all we do here.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from marserve.frontend.api.access_log import AccessLog
from marserve.frontend.api.auth import Kind, TokenStore
from marserve.frontend.api.origin import refuse_foreign_origin
from marserve.frontend.api.outputs import Answer, error_answer
from marserve.frontend.api.request_ids import new_request_id
from marserve.frontend.errors import BadRequest, RouteNotFound, ServeError
from marserve.frontend.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# How long a client whose request was answered early (413) may go on sending before we hang up.
_LINGERING_SECONDS = 2.0


@dataclass(slots=True)
class Visit:
    """One request at the door.

    Attributes:
        request: As aiohttp read it.
        segments: Its decoded path, split.
        id: The id the server gave it.
        arrived: Moment of arrival, on the monotonic clock.
    """

    request: web.BaseRequest
    segments: Sequence[str]
    id: str
    arrived: float


@dataclass(frozen=True)
class Route:
    """What answers for a first path segment.

    Attributes:
        serve: Answers a visit, or raises `ServeError`.
        guard: Whose key opens it; None for everybody.
    """

    serve: Callable[[Visit], Awaitable[Answer]]
    guard: Kind | None = None


class Door:
    """Everything between the socket of a listener and its routes.

    Args:
        routes: By first path segment.
        tokens: Checks tokens; None when authorization is off.
        local_management: Whether management is for programs of this machine only.
        prelude: Header lines of every answer.
        access_log: Where answers are noted.
        metrics: Where they are counted.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        tokens: TokenStore | None,
        local_management: bool = False,
        prelude: str,
        access_log: AccessLog,
        metrics: Metrics,
    ) -> None:
        self._routes = routes
        self._tokens = tokens
        self._local_management = local_management
        self._prelude = prelude
        self._access_log = access_log
        self._metrics = metrics

    def server(self) -> web.Server:
        """The aiohttp server that hands its requests to this door."""
        return _Server(
            self._answer,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,  # TorchServe passed bodies on as they came
            lingering_time=_LINGERING_SECONDS,
        )

    async def _answer(self, request: web.BaseRequest) -> Answer:
        arrived = time.monotonic()
        visit = Visit(request, (), new_request_id(), arrived)
        try:
            answer = await self._serve(visit)
        except ServeError as error:
            answer = error_answer(error)
        except Exception:  # the last resort
            logger.exception("Cannot answer %s %s", request.method, request.raw_path)
            answer = error_answer(ServeError("Internal server error."))
        answer.prelude = self._prelude
        if answer.status != 413:
            answer.request_id = visit.id
        self._metrics.count_response(answer.status)
        self._access_log.add(
            _peer(request),
            request.method,
            request.raw_path,
            answer.status,
            time.monotonic() - arrived,
        )
        return answer

    async def _serve(self, visit: Visit) -> Answer:
        visit.segments = _segments(visit.request.raw_path)
        route = self._routes.get(visit.segments[0] if visit.segments else "")
        if route is None:
            raise RouteNotFound
        if self._tokens is not None and route.guard is not None:
            self._tokens.authorize(route.guard, visit.request.headers.get("Authorization"))
        if self._local_management and route.guard == "management":
            refuse_foreign_origin(visit.request.headers)
        return await route.serve(visit)


def _segments(target: str) -> list[str]:
    """The decoded path of a request target, split; empty segments at its end are dropped."""
    path = target.partition("?")[0]
    if not path.startswith("/"):  # the absolute form that proxies use: http://host/path
        path = "/" + path.partition("://")[2].partition("/")[2]
    if "%" in path:
        path = unquote(path)
    segments = path.split("/")[1:]
    while segments and not segments[-1]:
        segments.pop()
    return segments


def _peer(request: web.BaseRequest) -> str:
    transport = request.transport
    name: Any = transport.get_extra_info("peername") if transport is not None else None
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""


class _Server(web.Server):
    """Gives every connection a protocol that speaks our error bodies."""

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """aiohttp's protocol; only what it says of requests that are no HTTP is ours."""

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002 - aiohttp's signature
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's signature
    ) -> web.StreamResponse:
        """Called by aiohttp when a request cannot be parsed, or when we failed badly."""
        if isinstance(exc, HttpProcessingError) or status == 400:
            answer = error_answer(BadRequest("Invalid HTTP message."))
        else:
            logger.error("A connection failed with status %d.", status, exc_info=exc)
            answer = error_answer(ServeError("Internal server error.", status=status))
        answer.force_close()
        return answer
