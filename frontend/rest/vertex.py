"""The routes of Vertex AI for predictions and health, whose paths Vertex AI chooses.

If a path is an existing route, such as ``/predictions/m`` or ``/ping``, that route answers.
Elsewhere predictions are those of the only model, and health is readiness, because Vertex sends
requests after the first positive answer.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass

from marserve.frontend.errors import BadRequest
from marserve.frontend.http.requests import HttpRequest, PlainRequest, split_path
from marserve.frontend.http.responses import HttpResponse
from marserve.frontend.http.router import ANY_OTHER, Route, Submit
from marserve.frontend.rest.inference import Predictor, server_readiness
from marserve.frontend.rest.openai import is_openai
from marserve.frontend.serving.registry import ModelRegistry

_EXTRA = {"explain": "False"}
_PREDICTING = ("predictions", "explanations", "invocations", "models")
_HEALTH = ("ping", "ready")
_MODELS = (["v1", "models"], ["v2", "models"], ["v2", "health"])


def vertex_routes(
    registry: ModelRegistry,
    max_request_bytes: int,
    routes: Mapping[str, Route],
    *,
    predict: str,
    health: str,
) -> Mapping[str, Route]:
    """Return the ``routes`` of the inference listener with the paths of Vertex AI added."""
    vertex = _Vertex(registry, max_request_bytes)
    predicts = Route(vertex.predict_only, "inference", accept=vertex.accept_only)
    if predict:
        routes = _with(routes, "POST", split_path(predict), predicts, _PREDICTING)
    if health:
        ready = Route(vertex.health, when_full=True)
        routes = _with(routes, "GET", split_path(health), ready, _HEALTH)
    return routes


def _with(
    routes: Mapping[str, Route],
    method: str,
    path: Sequence[str],
    route: Route,
    known: Sequence[str],
) -> Mapping[str, Route]:
    """Return the routes with one more path, which may be the root, unless they answer it."""
    first = path[0] if path else ""
    if first in known or list(path[:2]) in _MODELS or is_openai(path):
        return routes
    other = routes.get(first, routes[ANY_OTHER])

    def choose(request: HttpRequest | PlainRequest) -> Route:
        is_asked = request.method == method and list(request.segments) == list(path)
        return route if is_asked else other

    return {**routes, first: Route(other.serve, choose=choose)}


@dataclass(frozen=True)
class _Vertex(Predictor):
    def predict_only(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        return self.predict(request, self._asked(request.segments), extra=_EXTRA)

    def accept_only(self, request: PlainRequest) -> Submit | None:
        return self.accept(request, self._asked(request.segments), None, _EXTRA)

    def _asked(self, path: Sequence[str]) -> str:
        """Return the name of the only model, or the name in ``/{model}/predict``."""
        names = {model.name for model in self.registry if not model.origin.workflow}
        if path and path[0] in names and list(path[1:]) == ["predict"]:
            return path[0]
        if len(names) != 1:
            at_start = {model.name for model in self.registry if model.origin.at_start}
            names = at_start or names
        if len(names) != 1:
            raise BadRequest(
                "The predict route names no model, and there is not exactly one: "
                f"{', '.join(sorted(names)) or 'none'}."
            )
        return names.pop()

    async def health(self, _request: HttpRequest) -> HttpResponse:
        return server_readiness(self.registry)
