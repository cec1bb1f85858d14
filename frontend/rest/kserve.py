"""KServe's two protocols over HTTP; the second is the Open Inference Protocol (`open_inference`).

    /v1/models/{m}:predict    /v1/models/{m}:explain

As in TorchServe the server passes bodies on as they are, unless the model wants lists taken apart
(`client_lists`): the envelope that ``service_envelope`` names makes a handler understand them.
"""

from collections.abc import Awaitable, Mapping

from marserve.frontend.errors import RouteNotFound
from marserve.frontend.http.responses import HttpResponse
from marserve.frontend.http.router import HttpRequest, Route
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.rest.inference import Predictor
from marserve.frontend.rest.open_inference import open_inference_routes

# The headers that the server adds for the handler, by verb.
_VERBS = {"predict": {"explain": "False"}, "explain": {"explain": "True"}}


def kserve_routes(
    registry: ModelRegistry, max_request_bytes: int, *, open_inference: bool
) -> Mapping[str, Route]:
    """The routes below ``/v1`` and ``/v2``; of the second protocol all, or only what predicts."""
    kserve = _KServe(registry, max_request_bytes)
    second = open_inference_routes(registry, max_request_bytes, is_whole=open_inference)
    return {"v1": Route(kserve.serve, "inference"), **second}


class _KServe(Predictor):
    def serve(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        match request.segments:
            case [_, "models", target]:
                name, _, verb = target.rpartition(":")
                if name and verb in _VERBS:
                    return self.predict(request, name, extra=_VERBS[verb])
        raise RouteNotFound
