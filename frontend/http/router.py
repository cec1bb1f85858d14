"""Finds the route of a request, checks its token, and turns whatever happens into one response.

It does not use an aiohttp application: TorchServe's paths follow other rules (decoded before they
are split, trailing slashes dropped, every method served), and what an application does per request
(matching, signals, middlewares) costs as much as everything here.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from aiohttp import web

from marserve.frontend.batching.jobs import OnAnswer
from marserve.frontend.errors import RouteNotFound, ServeError, unexpected
from marserve.frontend.http.connections import Connection
from marserve.frontend.http.responses import HttpResponse, error_response
from marserve.frontend.security.guard import Guard
from marserve.frontend.security.tokens import Kind
from marserve.frontend.serving.predict_request import Ticket
from marserve.frontend.serving.request_ids import new_request_id
from marserve.frontend.telemetry.access_log import AccessLog

logger = logging.getLogger(__name__)

#: The key of the route for all first segments that are not in a table of routes.
ANY_OTHER = "*"


class HttpRequest:
    """A request as aiohttp has read its head.

    Attributes:
        raw: aiohttp's view of it.
        headers: Names are found in any case.
        segments: The decoded path, split.
        id: The id the server gave it.
        arrived: When its head had come, on the monotonic clock.
    """

    def __init__(self, raw: web.BaseRequest, connection: Connection) -> None:
        self.arrived = time.monotonic()
        self.raw = raw
        self.connection = connection
        self.method = raw.method
        self.target = raw.raw_path
        self.headers: Mapping[str, str] = raw.headers
        self.segments: Sequence[str] = split_path(self.target)
        self.id = new_request_id()

    @property
    def query(self) -> str:
        """The query of the target, as the client wrote it."""
        return self.target.partition("?")[2].partition("#")[0]


@dataclass(slots=True)
class PlainRequest:
    """The head of a request that the fast path may answer; attributes as those of `HttpRequest`."""

    method: str
    target: str
    headers: Mapping[str, str]  # by their names in lower case
    raw_headers: dict[str, str]  # by their names as the client wrote them
    length: int  # of the body, in bytes
    segments: Sequence[str]
    id: str
    arrived: float
    connection: Connection
    refuse: Callable[[ServeError], HttpResponse] = error_response  # see `Route`


#: Submits a plain request, given its body, or raises the `ServeError` that refuses it.
Submit = Callable[[bytes, OnAnswer], Ticket]


@dataclass(frozen=True)
class Route:
    """What answers the requests with a first path segment.

    Attributes:
        serve: Answers a request, or raises `ServeError`.
        guard: The kind of key that a request needs; None for no key.
        refuse: Makes the response to a failure, in the format that the route's clients know.
        accept: Given the head of a plain request, returns the function that submits it on the fast
            path. None, or a `ServeError`, leaves the request to ``serve``.
        choose: Returns the route of a request where the first segment alone does not determine it;
            the other attributes are then those of the chosen route. It raises nothing.
    """

    serve: Callable[[HttpRequest], Awaitable[HttpResponse]]
    guard: Kind | None = None
    refuse: Callable[[ServeError], HttpResponse] = error_response
    accept: Callable[[PlainRequest], Submit | None] | None = None
    choose: "Callable[[HttpRequest | PlainRequest], Route] | None" = None


class Router:
    """Everything between the connections of a listener and its routes.

    The ``routes`` are by first path segment, perhaps with `ANY_OTHER`; every answer has the
    ``common_headers``, which are header lines.
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
        self._any_other = routes.get(ANY_OTHER, Route(_not_found))
        self._guard = guard

    async def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer a request, whatever happens, and log it."""
        segments = request.segments
        route = self._routes.get(segments[0] if segments else "", self._any_other)
        while route.choose is not None:
            route = route.choose(request)
        try:
            self._guard.admit(route.guard, request.headers)
            answer = await route.serve(request)
        except ServeError as error:
            answer = route.refuse(error)
        except Exception as error:  # the last resort
            logger.exception("Cannot answer %s %s", request.method, request.target)
            answer = route.refuse(unexpected(error))
        seconds = time.monotonic() - request.arrived
        peer = request.connection.peer
        self.access_log.add(peer, request.method, request.target, answer.status, seconds)
        return answer

    def accept(self, request: PlainRequest) -> Submit | None:
        """The function that submits a plain request; None where `answer` is to answer it.

        That includes whatever is wrong with a request: `answer` refuses it.
        """
        segments = request.segments
        route = self._routes.get(segments[0]) if segments else None
        while route is not None and route.choose is not None:
            route = route.choose(request)
        if route is None or route.accept is None:
            return None
        try:
            self._guard.admit(route.guard, request.headers)
            request.refuse = route.refuse
            return route.accept(request)
        except ServeError:
            return None


async def _not_found(_request: HttpRequest) -> HttpResponse:
    raise RouteNotFound


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
