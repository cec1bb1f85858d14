"""The routes by which Vertex AI asks for predictions and for health, whatever it calls them.

Where they are routes that every server has, such as ``/predictions/m`` and ``/ping``, those answer.
Elsewhere predictions are those of the one model that there is, and health is readiness: Vertex
sends requests once it is told yes.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass

from marserve.frontend.errors import BadRequest
from marserve.frontend.http.responses import HttpResponse, json_response
from marserve.frontend.http.router import (
    ANY_OTHER,
    HttpRequest,
    PlainRequest,
    Route,
    Submit,
    split_path,
)
from marserve.frontend.models.readiness import is_server_ready, unready
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.rest.inference import Predictor

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
    """``routes``, those of the inference listener, with the paths that Vertex asks at."""
    vertex = _Vertex(registry, max_request_bytes)
    predicts = Route(vertex.predict_only, "inference", accept=vertex.accept_only)
    routes = _with(routes, split_path(predict), predicts, _PREDICTING)
    return _with(routes, split_path(health), Route(vertex.health), _HEALTH)


def _with(
    routes: Mapping[str, Route], path: Sequence[str], route: Route, known: Sequence[str]
) -> Mapping[str, Route]:
    """The routes with one more at a path, unless they answer it."""
    if not path or path[0] in known or list(path[:2]) in _MODELS:
        return routes
    other = routes.get(path[0], routes[ANY_OTHER])

    def chosen(segments: Sequence[str]) -> Route:
        return route if list(segments) == list(path) else other

    def serve(request: HttpRequest) -> Awaitable[HttpResponse]:
        return chosen(request.segments).serve(request)

    def accept(request: PlainRequest) -> Submit | None:
        accepts = chosen(request.segments).accept
        return accepts(request) if accepts else None

    return {**routes, path[0]: Route(serve, route.guard, other.refuse, accept)}


@dataclass(frozen=True)
class _Vertex(Predictor):
    def predict_only(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        return self.predict(request, self._asked(request.segments), extra=_EXTRA)

    def accept_only(self, request: PlainRequest) -> Submit | None:
        return self.accept(request, self._asked(request.segments), None, _EXTRA)

    def _asked(self, path: Sequence[str]) -> str:
        """The name of the one model that there is, or of the one in ``/{model}/predict``."""
        names = {model.name for model in self.registry if not model.workflow}
        if path[0] in names and list(path[1:]) == ["predict"]:
            return path[0]
        if len(names) != 1:
            at_start = {model.name for model in self.registry if model.loaded_at_start}
            names = at_start or names
        if len(names) != 1:
            raise BadRequest(
                "The predict route names no model, and there is not exactly one: "
                f"{', '.join(sorted(names)) or 'none'}."
            )
        return names.pop()

    async def health(self, _request: HttpRequest) -> HttpResponse:
        if is_server_ready(self.registry):
            return json_response({"status": "Ready"})
        waiting = unready(self.registry)
        return json_response({"status": "Not ready", "models": waiting}, status=503)
