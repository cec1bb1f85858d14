"""KServe's two protocols over HTTP; the second is the Open Inference Protocol.

    /v1/models/{m}:predict    /v1/models/{m}:explain
    /v2/models/{m}/infer      /v2/models/{m}/explain

and, only where ``ts_open_inference_protocol`` is on:

    /v2                                    who serves
    /v2/health/live  /v2/health/ready      that it runs, and whether it can answer now
    /v2/models/{m}                         which versions there are
    /v2/models/{m}/ready                   whether the model can answer now
    /v2/models/{m}/versions/{v}[/verb]     any of these for a version (TorchServe: 501)

As in TorchServe the server passes bodies on as they are, unless the model wants lists taken apart
(`client_lists`): the envelope that ``service_envelope`` names makes a handler understand them.
TorchServe's /v2/health/ready was always true; ours means it. Where all of the second protocol is
offered, its failures have its own member, ``error``, beside TorchServe's.
"""

from collections.abc import Awaitable, Mapping, Sequence

from marserve.frontend.errors import RouteNotFound, ServeError
from marserve.frontend.http.responses import HttpResponse, error_response, json_response
from marserve.frontend.http.router import HttpRequest, Route
from marserve.frontend.models.readiness import is_ready, is_server_ready
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.rest.inference import Predictor
from marserve.frontend.version import __version__

# The headers that the server adds for the handler, by verb.
_V1 = {"predict": {"explain": "False"}, "explain": {"explain": "True"}}
_V2 = {"infer": {"explain": "False"}, "explain": {"explain": "True"}}
_EXTENSIONS = ["kserve", "kubeflow"]


def kserve_routes(
    registry: ModelRegistry, max_request_bytes: int, *, open_inference: bool
) -> Mapping[str, Route]:
    """The routes below ``/v1`` and ``/v2``; of the second protocol all, or only what predicts."""
    kserve = _KServe(registry, max_request_bytes)
    v2 = Route(kserve.v2_predictions, "inference")
    if open_inference:
        v2 = Route(kserve.v2, "inference", _refuse)
    return {"v1": Route(kserve.v1, "inference"), "v2": v2}


class _KServe(Predictor):
    def v1(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        match request.segments:
            case [_, "models", target]:
                name, _, verb = target.rpartition(":")
                if name and verb in _V1:
                    return self.predict(request, name, extra=_V1[verb])
        raise RouteNotFound

    def v2_predictions(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        match request.segments:
            case [_, "models", name, verb] if verb in _V2:
                return self.predict(request, name, extra=_V2[verb])
        raise RouteNotFound

    async def v2(self, request: HttpRequest) -> HttpResponse:
        match request.segments:
            case [_]:
                return _server_metadata()
            case [_, "health", "live"]:
                return json_response({"live": True})
            case [_, "health", "ready"]:
                return _readiness({}, ready=is_server_ready(self.registry))
            case [_, "models", name, "versions", version, *verb]:
                return await self._v2_model(request, name, version, verb)
            case [_, "models", name, *verb]:
                return await self._v2_model(request, name, None, verb)
        raise RouteNotFound

    async def _v2_model(
        self, request: HttpRequest, name: str, version: str | None, verb: Sequence[str]
    ) -> HttpResponse:
        match verb:
            case []:
                return self._model_metadata(name, version)
            case ["ready"]:
                ready = is_ready(self.registry, self.registry.find(name, version))
                return _readiness({"name": name}, ready=ready)
            case [predicts] if predicts in _V2:
                return await self.predict(request, name, version, extra=_V2[predicts])
        raise RouteNotFound

    def _model_metadata(self, name: str, version: str | None) -> HttpResponse:
        self.registry.find(name, version)
        return json_response(
            {
                "name": name,
                "versions": [model.version for model in self.registry.versions(name)],
                # A handler takes and gives what it likes; TorchServe says the same over gRPC.
                "platform": "",
                "inputs": [],
                "outputs": [],
            }
        )


def _server_metadata() -> HttpResponse:
    return json_response(
        {
            "name": "Torchserve",
            "version": __version__,
            "extenstion": _EXTENSIONS,  # TorchServe's slip, which its clients may read
            "extensions": _EXTENSIONS,
        }
    )


def _refuse(error: ServeError) -> HttpResponse:
    return error_response(error, {"error": error.message or error.wire_type})


def _readiness(members: dict[str, str], *, ready: bool) -> HttpResponse:
    return json_response({**members, "ready": ready}, status=200 if ready else 503)
