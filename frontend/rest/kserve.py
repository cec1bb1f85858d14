"""KServe's first protocol over HTTP; the second is the Open Inference Protocol (`open_inference`).

    /v1/models/{m}:predict    /v1/models/{m}:explain
    GET /v1/models/{m}        whether a model can answer now, 503 if not; and OpenAI's description
    GET /                     the server runs: only on the listener of the platform KServe

Bodies are passed on unchanged, unless the model splits lists (`client_lists`).
"""

from collections.abc import Awaitable, Mapping, Sequence

from marserve.frontend.errors import MethodNotAllowed, RouteNotFound
from marserve.frontend.http.requests import HttpRequest, PlainRequest
from marserve.frontend.http.responses import HttpResponse, json_response
from marserve.frontend.http.router import Route, Submit
from marserve.frontend.operations.openai_models import find_named, model_document
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
    readiness = Route(kserve.readiness, "inference", refusal, when_full=True)
    others = Route(kserve.serve, "inference", accept=kserve.accept_prediction)
    v1 = _v1(readiness, others)
    return {"v1": with_openai(v1, registry, max_request_bytes), **second}


def kserve_platform_routes(
    registry: ModelRegistry, max_request_bytes: int, root: Route
) -> Mapping[str, Route]:
    """Return the routes that the listener of the platform KServe adds or replaces.

    ``root`` answers the requests at ``/`` that are not from a probe.
    """
    kserve = _KServe(registry, max_request_bytes)

    async def live(request: HttpRequest) -> HttpResponse:
        try:
            return await root.serve(request)
        except MethodNotAllowed:
            if request.method != "GET" or request.segments:
                raise
            return json_response({"status": "alive"})

    readiness = Route(kserve.readiness, "inference", refusal, when_full=True)
    others = Route(kserve.serve, "inference", refusal, accept=kserve.accept_prediction)
    return {
        "": Route(live, when_full=True),
        "v1": with_openai(_v1(readiness, others), registry, max_request_bytes),
    }


def _v1(readiness: Route, others: Route) -> Route:
    def choose(request: HttpRequest | PlainRequest) -> Route:
        return readiness if _is_of_model(request) else others

    return Route(others.serve, "inference", choose=choose)


class _KServe(Predictor):
    def serve(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        name, extra = _asked(request.segments)
        return self.predict(request, name, extra=extra)

    async def readiness(self, request: HttpRequest) -> HttpResponse:
        name = "/".join(request.segments[2:])
        model = find_named(self.registry, name)
        members = {"name": name, **model_document(name, model)}
        return readiness_response(members, ready=is_ready(self.registry, model))

    def accept_prediction(self, request: PlainRequest) -> Submit | None:
        name, extra = _asked(request.segments)
        return self.accept(request, name, None, extra)


def _is_of_model(request: HttpRequest | PlainRequest) -> bool:
    """Return whether a request is for a model itself, whose name may contain slashes."""
    match request.segments:
        case [_, "models", *_, last]:
            return request.method == "GET" and last.rpartition(":")[2] not in _VERBS
    return False


def _asked(segments: Sequence[str]) -> tuple[str, Extra]:
    match segments:
        case [_, "models", target]:
            name, _, verb = target.rpartition(":")
            if name and verb in _VERBS:
                return name, _VERBS[verb]
    raise RouteNotFound
