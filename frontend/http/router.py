"""A listener's door: finds the route, checks the token, and turns whatever happens into one answer.

It is an aiohttp low-level server rather than an application: TorchServe's paths are not aiohttp's
(percent-decoded before they are split, trailing slashes dropped, every method served), and what an
application does per request (matching, signals, middlewares) costs as much as all we do here.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from aiohttp import StreamReader, web
from aiohttp.http import RawRequestMessage

from marserve.frontend.errors import RouteNotFound, ServeError
from marserve.frontend.http.authentication import KINDS, Kind
from marserve.frontend.http.connections import ConnectionLimits, ConnectionServer
from marserve.frontend.http.express import Errand, Express, Lane, is_whole, whole_request
from marserve.frontend.http.guard import Guard
from marserve.frontend.http.ledger import Ledger
from marserve.frontend.http.request_ids import new_request_id
from marserve.frontend.http.responses import Answer, error_answer

logger = logging.getLogger(__name__)

#: In a table of routes: answers for the first segments that are not in it.
ANY_OTHER = "*"

_DEFAULT_LIMITS = ConnectionLimits()


@dataclass(slots=True)
class HttpRequest:
    """One request at the door.

    Attributes:
        request: As aiohttp read it.
        segments: Its decoded path, split.
        id: The id the server gave it.
        arrived: Moment of arrival, on the monotonic clock.
        route: What answers it; None until that is known, and where nothing does.
    """

    request: web.BaseRequest
    segments: Sequence[str]
    id: str
    arrived: float
    route: "Route | None" = None


@dataclass(frozen=True)
class Route:
    """What answers for a first path segment.

    Attributes:
        serve: Answers a visit, or raises `ServeError`.
        guard: Whose key opens it; None for everybody.
        refuse: Makes the answer of what went wrong, in the words its clients know.
        express: A quicker way for the requests that are plain; see `api.express`.
    """

    serve: Callable[[HttpRequest], Awaitable[Answer]]
    guard: Kind | None = None
    refuse: Callable[[ServeError], Answer] = error_answer
    express: Express | None = None


class Router:
    """Everything between the socket of a listener and its routes.

    Args:
        routes: By first path segment; the one at `ANY_OTHER`, if any, answers for all the others.
        guard: Stands before the routes that are not for everybody.
        ledger: Where answers are noted.
        limits: What clients may hold.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        guard: Guard,
        ledger: Ledger,
        limits: ConnectionLimits = _DEFAULT_LIMITS,
    ) -> None:
        self._routes = routes
        self._any_other = routes.get(ANY_OTHER)
        self._guard = guard
        self._guarded = frozenset(kind for kind in KINDS if guard.has_rules_for(kind))
        self._ledger = ledger
        self._limits = limits

    def server(self) -> web.Server:
        """The aiohttp server that hands its requests to this door."""
        return ConnectionServer(self._answer, self._limits, self._refuse, self._express)

    async def _answer(self, request: web.BaseRequest) -> Answer:
        arrived = time.monotonic()
        visit = HttpRequest(request, (), new_request_id(), arrived)
        try:
            answer = await self._serve(visit)
        except ServeError as error:
            answer = _refusal(visit, error)
        except Exception:  # the last resort
            logger.exception("Cannot answer %s %s", request.method, request.raw_path)
            answer = _refusal(visit, ServeError("Internal server error."))
        answer.request_id = visit.id
        peer = request.protocol.peer  # type: ignore[attr-defined]  # it is a Connection
        seconds = time.monotonic() - arrived
        return self._sent(answer, peer, request.method, request.raw_path, seconds)

    def _refuse(self, peer: str, error: ServeError) -> Answer:
        """The answer to what could not be read as a request."""
        answer = error_answer(error)
        answer.request_id = new_request_id()
        return self._sent(answer, peer, "GET", "/bad-request", 0.0)  # TorchServe's words for it

    def _sent(self, answer: Answer, peer: str, method: str, target: str, seconds: float) -> Answer:
        """Note an answer that is about to be sent."""
        answer.prelude = self._ledger.prelude
        self._ledger.note(peer, method, target, answer.status, seconds)
        return answer

    def _express(self, lane: Lane, message: RawRequestMessage, body: StreamReader) -> Errand | None:
        """Begin to answer a request that has just come, if it is plain; None if it is not."""
        if not is_whole(message, body):
            return None
        segments = _segments(message.path)
        route = self._routes.get(segments[0]) if segments else None
        if route is None or route.express is None:
            return None
        if route.guard in self._guarded:
            try:
                self._guard.admit(route.guard, message.headers)
            except ServeError:
                return None  # the ordinary way says it better
        errand = Errand(whole_request(message, body, segments), route.refuse, lane, self._ledger)
        return errand if errand.begin(route.express) else None

    async def _serve(self, visit: HttpRequest) -> Answer:
        segments = visit.segments = _segments(visit.request.raw_path)
        route = self._routes.get(segments[0] if segments else "", self._any_other)
        visit.route = route
        if route is None:
            raise RouteNotFound
        if route.guard in self._guarded:
            self._guard.admit(route.guard, visit.request.headers)
        return await route.serve(visit)


def _refusal(visit: HttpRequest, error: ServeError) -> Answer:
    return error_answer(error) if visit.route is None else visit.route.refuse(error)


def _segments(target: str) -> list[str]:
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
