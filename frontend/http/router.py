"""Finds the route of a request, checks its key, and returns exactly one response.

An aiohttp application is not used: TorchServe's paths follow other rules, and the work of an
application per request costs as much as everything here.
"""

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from marserve.backend.protocol import Buffer, Prediction
from marserve.backend.spans import TRACEPARENT
from marserve.frontend.batching.jobs import OnAnswer
from marserve.frontend.errors import InvalidToken, RouteNotFound, ServeError, unexpected
from marserve.frontend.http.requests import HttpRequest, PlainRequest
from marserve.frontend.http.responses import HttpResponse, error_response, refusal_response
from marserve.frontend.security.guard import Guard
from marserve.frontend.security.tokens import Kind
from marserve.frontend.serving.predict_request import Ticket
from marserve.frontend.telemetry.access_log import CLIENT_ID_HEADER, AccessLog
from marserve.frontend.telemetry.trace_context import NO_SAMPLING, Sampling, TraceContext
from marserve.frontend.tracing.explanations import server_timing
from marserve.frontend.tracing.time_lines import TimeLines

logger = logging.getLogger(__name__)

#: The entry of a table of routes for all first segments that have none.
ANY_OTHER = "*"


# Methods of probes and browsers, which start no trace.
_UNTRACED = frozenset(("GET", "HEAD", "OPTIONS"))
# The value of the header does not matter.
_TIMING_HEADER = "x-server-timing"

#: Submits a plain request, given its body, or raises the `ServeError` that refuses it.
Submit = Callable[[Buffer, OnAnswer], Ticket]


@dataclass(frozen=True)
class Route:
    """What answers the requests with a first path segment.

    Attributes:
        serve: Answers a request, or raises `ServeError`.
        key: The kind of key that a request needs; None for no key.
        refuse: Makes the response to a failure, in the format of the route's clients.
        accept: Given the head of a plain request, returns the function that submits it on the fast
            path. None, or a `ServeError`, leaves the request to ``serve``.
        choose: Returns the route of a request where the first segment alone does not determine it;
            the other attributes are then those of the chosen route. It raises nothing.
        when_full: Whether it is served, as management is, while the clients use as much memory as
            they may. Health is, so that balancers do not remove every replica.
    """

    serve: Callable[[HttpRequest], Awaitable[HttpResponse]]
    key: Kind | None = None
    refuse: Callable[[ServeError], HttpResponse] = error_response
    accept: Callable[[PlainRequest], Submit | None] | None = None
    choose: "Callable[[HttpRequest | PlainRequest], Route] | None" = None
    when_full: bool = False


async def _not_found(_request: HttpRequest) -> HttpResponse:
    raise RouteNotFound


_NOT_FOUND = Route(_not_found)


@dataclass(frozen=True)
class Router:
    """Passes the requests of a listener to its routes, by first path segment."""

    routes: Mapping[str, Route]
    _: KW_ONLY
    guard: Guard
    access_log: AccessLog
    time_lines: TimeLines = field(default_factory=TimeLines)
    common_headers: str  # header lines of every answer
    sampling: Sampling = NO_SAMPLING

    async def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer a request, also after an unexpected error, and log it."""
        route = self._route(request)
        self._find_trace(request, route)
        try:
            self.guard.admit(route.key, request.headers)
            memory = request.memory
            memory.is_vital = route.when_full or route.key == "management"
            if not memory.is_vital:
                memory.hold(0)  # a request without a body may have a large answer
            answer = await route.serve(request)
            if answer.content is not None:
                answer.body = await memory.run(answer.content)
            else:
                memory.hold_answer(len(answer.body))
        except ServeError as error:
            if isinstance(error, InvalidToken) and self._is_preflight(request):
                answer = HttpResponse(200)
            else:
                answer = refusal(request, route.refuse, error)
        except Exception as error:  # the last resort
            logger.exception("Cannot answer %s %s", request.method, request.target)
            answer = refusal(request, route.refuse, unexpected(error))
        self.log(request, answer)
        return answer

    def _route(self, request: HttpRequest | PlainRequest) -> Route:
        segments = request.segments
        route = self.routes.get(segments[0] if segments else "")
        route = route or self.routes.get(ANY_OTHER, _NOT_FOUND)
        while route.choose is not None:
            route = route.choose(request)
        return route

    def is_probe(self, request: PlainRequest) -> bool:
        """Return whether a request asks for health, or for what the listener serves."""
        return not request.segments or self._route(request).when_full

    def _is_preflight(self, request: HttpRequest) -> bool:
        """Return whether a browser asks for the CORS headers, which it does without a key."""
        return (
            request.method == "OPTIONS"
            and {"origin", "access-control-request-method"} <= request.headers.keys()
            and "access-control-allow-origin" in self.common_headers
        )

    def log(self, request: HttpRequest | PlainRequest, answer: HttpResponse | Prediction) -> None:
        """Count and log the response to a request, before it is sent.

        Add the header Server-Timing, if the request asks for it; a stream has none yet.
        """
        self.access_log.add(
            request.connection.peer,
            request.method,
            request.target,
            answer.status,
            time.monotonic() - request.arrived,
            request.id,
            request.headers.get(CLIENT_ID_HEADER),
            request.trace,
        )
        if _TIMING_HEADER in request.headers and (line := self.time_lines.of_answer(request.id)):
            answer.headers = {**(answer.headers or {}), "server-timing": server_timing(line)}

    def _find_trace(self, request: HttpRequest | PlainRequest, route: Route) -> None:
        starts = self.sampling.ratio is not None and route.key == "inference"
        if TRACEPARENT in request.headers or (starts and request.method not in _UNTRACED):
            request.trace = trace = self.sampling.context_of(request.headers)
            if isinstance(trace, TraceContext):
                path = request.target.partition("?")[0]
                attributes = {"http.request.method": request.method, "url.path": path}
                request.trace = trace._replace(attributes=attributes)

    def accept(self, request: PlainRequest) -> Submit | None:
        """Return the function that submits a plain request; None leaves the request to `answer`.

        Requests with an error are left to `answer`, too, which refuses them.
        """
        segments = request.segments
        route = self.routes.get(segments[0]) if segments else None
        while route is not None and route.choose is not None:
            route = route.choose(request)
        if route is None or route.accept is None:
            return None
        try:
            self.guard.admit(route.key, request.headers)
            request.refuse = route.refuse
            if self.sampling.ratio is not None or TRACEPARENT in request.headers:
                self._find_trace(request, route)
            return route.accept(request)
        except ServeError:
            return None


def refusal(
    request: HttpRequest | PlainRequest,
    refuse: Callable[[ServeError], HttpResponse],
    error: ServeError,
) -> HttpResponse:
    """Return the response to a failure; with a trace, errors of TorchServe's format have the ids.

    Without one they are those of TorchServe to the byte, which clients compare.
    """
    answer = refuse(error)
    error.drop_frames()
    if request.trace is None or not (trace_id := request.trace.trace_id):
        return answer
    document = json.loads(bytes(answer.body))
    if "type" not in document or "error" in document:
        return answer
    ids = {"requestId": request.id, "traceId": trace_id}
    return refusal_response({**document, **ids}, answer.status, answer.headers or {})
