"""KServe's first protocol over HTTP; the second is the Open Inference Protocol (`open_inference`).

    /v1/models/{m}:predict    /v1/models/{m}:explain

and, only on the listener of the platform KServe, whose clients and probes expect them:

    GET /                     the server runs
    GET /v1/models/{m}        whether a model can answer now; 503 if not

Bodies are passed on unchanged, unless the model splits lists (`client_lists`).
"""

from collections.abc import Awaitable, Mapping, Sequence

from marserve.frontend.errors import MethodNotAllowed, RouteNotFound
from marserve.frontend.http.requests import HttpRequest, PlainRequest
from marserve.frontend.http.responses import HttpResponse, json_response
from marserve.frontend.http.router import Route, Submit
from marserve.frontend.rest.inference import Extra, Predictor
from marserve.frontend.rest.open_inference import open_inference_routes, readiness_response, refusal
from marserve.frontend.rest.openai import with_openai
from marserve.frontend.serving.readiness import is_ready
from marserve.frontend.serving.registry import ModelRegistry

# The headers that the server adds for the handler, by verb.
_VERBS = {"predict": {"explain": "False"}, "explain": {"explain": "True"}}


def kserve_routes(
    registry: ModelRegistry, max_request_bytes: int, *, open_inference: bool
) -> Mapping[str, Route]:
    """Return the routes below ``/v1`` and ``/v2``; of the second all, or only predictions."""
    kserve = _KServe(registry, max_request_bytes)
    second = open_inference_routes(registry, max_request_bytes, is_whole=open_inference)
    v1 = Route(kserve.serve, "inference", accept=kserve.accept_prediction)
    return {"v1": with_openai(v1, registry, max_request_bytes), **second}


def kserve_platform_routes(
    registry: ModelRegistry, max_request_bytes: int, root: Route
) -> Mapping[str, Route]:
    """Return the routes that the listener of the platform KServe adds or replaces.

    ``root`` answers the requests at ``/`` that are not from a probe.
    """
    platform = _KServePlatform(registry, max_request_bytes)

    async def live(request: HttpRequest) -> HttpResponse:
        try:
            return await root.serve(request)
        except MethodNotAllowed:
            if request.method != "GET" or request.segments:
                raise
            return json_response({"status": "alive"})

    readiness = Route(platform.serve, "inference", refusal, when_full=True)
    others = Route(platform.serve, "inference", refusal, accept=platform.accept_prediction)

    def choose(request: HttpRequest | PlainRequest) -> Route:
        return readiness if _is_probe(request) else others

    v1 = Route(platform.serve, choose=choose)
    return {
        "": Route(live, when_full=True),
        "v1": with_openai(v1, registry, max_request_bytes),
    }


class _KServe(Predictor):
    def serve(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        name, extra = _asked(request.segments)
        return self.predict(request, name, extra=extra)

    def accept_prediction(self, request: PlainRequest) -> Submit | None:
        name, extra = _asked(request.segments)
        return self.accept(request, name, None, extra)


def _is_probe(request: HttpRequest | PlainRequest) -> bool:
    match request.segments:
        case [_, "models", name]:
            return request.method == "GET" and ":" not in name
    return False


class _KServePlatform(_KServe):
    def serve(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        if _is_probe(request):
            return self._readiness(request.segments[-1])
        return super().serve(request)

    async def _readiness(self, name: str) -> HttpResponse:
        ready = is_ready(self.registry, self.registry.find(name))
        return readiness_response({"name": name}, ready=ready)


def _asked(segments: Sequence[str]) -> tuple[str, Extra]:
    match segments:
        case [_, "models", target]:
            name, _, verb = target.rpartition(":")
            if name and verb in _VERBS:
                return name, _VERBS[verb]
    raise RouteNotFound
