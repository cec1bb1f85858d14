"""Finds the route of a request, checks its token, and turns whatever happens into one response.

There is no aiohttp application behind it: TorchServe's paths are not aiohttp's (percent-decoded
before they are split, trailing slashes dropped, every method served), and what an application does
per request (matching, signals, middlewares) costs as much as all we do here.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from aiohttp import web

from marserve.frontend.batching.jobs import OnAnswer
from marserve.frontend.errors import RouteNotFound, ServeError
from marserve.frontend.http.access_log import AccessLog
from marserve.frontend.http.authentication import KINDS, Guard, Kind
from marserve.frontend.http.limits import ConnectionLimits
from marserve.frontend.http.request_ids import new_request_id
from marserve.frontend.http.responses import HttpResponse, error_response
from marserve.frontend.models.predict_request import Ticket

logger = logging.getLogger(__name__)

#: In a table of routes: answers for the first segments that are not in it.
ANY_OTHER = "*"


class HttpRequest:
    """A request as aiohttp has read its head.

    Args:
        raw: aiohttp's view of it.
        transport: Writes to the client.
        peer: Who that is.
        limits: What the client may hold.

    Attributes:
        method: As the client wrote it.
        target: As the client wrote it.
        headers: Names are found in any case.
        segments: The decoded path, split.
        id: The id the server gave it.
        arrived: When its head had come, on the monotonic clock.
    """

    def __init__(
        self,
        raw: web.BaseRequest,
        transport: asyncio.WriteTransport,
        peer: str,
        limits: ConnectionLimits,
    ) -> None:
        self.arrived = time.monotonic()
        self.raw = raw
        self.transport = transport
        self.peer = peer
        self.limits = limits
        self.method = raw.method
        self.target = raw.raw_path
        self.headers: Mapping[str, str] = raw.headers
        self.segments: Sequence[str] = split_path(self.target)
        self.id = new_request_id()


@dataclass(slots=True)
class PlainRequest:
    """The head of a request that the fast path may answer, with a body that is no form.

    Attributes:
        method: As the client wrote it.
        target: As the client wrote it.
        headers: By their names in lower case.
        raw_headers: By their names as the client wrote them.
        length: Of the body, in bytes.
        segments: The decoded path, split.
        id: The id the server gave it.
        arrived: When its head had come, on the monotonic clock.
        refuse: Makes the answer of what goes wrong; its route's.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    raw_headers: dict[str, str]
    length: int
    segments: Sequence[str]
    id: str
    arrived: float
    refuse: Callable[[ServeError], HttpResponse] = error_response


#: Has a plain request answered, given its body, or raises the `ServeError` that refuses it.
Submit = Callable[[bytes, OnAnswer], Ticket]


@dataclass(frozen=True)
class Route:
    """What answers for a first path segment.

    Attributes:
        serve: Answers a request, or raises `ServeError`.
        guard: Whose key opens it; None for everybody.
        refuse: Makes the answer of what went wrong, in the words its clients know.
        accept: Says how a plain request is answered on the fast path: given its head, returns what
            submits it. None, or a `ServeError`, where it is to be answered by ``serve``.
    """

    serve: Callable[[HttpRequest], Awaitable[HttpResponse]]
    guard: Kind | None = None
    refuse: Callable[[ServeError], HttpResponse] = error_response
    accept: Callable[[PlainRequest], Submit | None] | None = None


class Router:
    """Everything between the connections of a listener and its routes.

    Args:
        routes: By first path segment; the one at `ANY_OTHER`, if any, answers for all the others.
        guard: Stands before the routes that are not for everybody.
        access_log: Where answers are noted.
        common_headers: Header lines of every answer.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        guard: Guard,
        access_log: AccessLog,
        common_headers: str,
    ) -> None:
        self.access_log = access_log
        self.common_headers = common_headers
        self._routes = routes
        self._any_other = routes.get(ANY_OTHER)
        self._guard = guard
        self._guarded = frozenset(kind for kind in KINDS if guard.has_rules_for(kind))

    async def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer a request, whatever happens, and log it."""
        segments = request.segments
        route = self._routes.get(segments[0] if segments else "", self._any_other)
        try:
            answer = await self._serve(route, request)
        except ServeError as error:
            answer = _refusal(route, error)
        except Exception:  # the last resort
            logger.exception("Cannot answer %s %s", request.method, request.target)
            answer = _refusal(route, ServeError("Internal server error."))
        seconds = time.monotonic() - request.arrived
        self.access_log.add(request.peer, request.method, request.target, answer.status, seconds)
        return answer

    async def _serve(self, route: Route | None, request: HttpRequest) -> HttpResponse:
        if route is None:
            raise RouteNotFound
        self._check(route, request.headers)
        return await route.serve(request)

    def accept(self, request: PlainRequest) -> Submit | None:
        """What submits a plain request; None where the fast path is not for it.

        Whatever speaks against a request is left to `answer` to say.
        """
        segments = request.segments
        route = self._routes.get(segments[0]) if segments else None
        if route is None or route.accept is None:
            return None
        try:
            self._check(route, request.headers)
            request.refuse = route.refuse
            return route.accept(request)
        except ServeError:
            return None

    def _check(self, route: Route, headers: Mapping[str, str]) -> None:
        if route.guard in self._guarded:
            self._guard.admit(route.guard, headers)


def _refusal(route: Route | None, error: ServeError) -> HttpResponse:
    return error_response(error) if route is None else route.refuse(error)


def split_path(target: str) -> list[str]:
    """The decoded path of a request target, split; empty segments at its end are dropped."""
    path = target.partition("?")[0].partition("#")[0]
    if not path.startswith("/"):  # the absolute form that proxies use: http://host/path
        path = "/" + path.partition("://")[2].partition("/")[2]
    if "%" in path:
        path = unquote(path)
    segments = path.split("/")[1:]
    while segments and not segments[-1]:
        segments.pop()
    return segments
