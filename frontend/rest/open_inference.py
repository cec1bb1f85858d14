"""KServe's second protocol, the Open Inference Protocol: everything below ``/v2``.

    /v2/models/{m}/infer      predict
    /v2/models/{m}/explain    explain

and, only where ``ts_open_inference_protocol`` is on:

    /v2                                    who serves
    /v2/health/live  /v2/health/ready      that it runs, and whether it can answer now
    /v2/models/{m}                         which versions there are
    /v2/models/{m}/ready                   whether the model can answer now
    /v2/models/{m}/versions/{v}[/verb]     any of these for a version (TorchServe: 501)

As in TorchServe the server passes bodies on as they are: ``service_envelope=kservev2`` makes a
handler understand them. TorchServe's /v2/health/ready was always true; ours means it. The whole
protocol also says what went wrong in its own word, ``error``, beside TorchServe's.
"""

from collections.abc import Awaitable, Sequence

from marserve.frontend.errors import RouteNotFound, ServeError
from marserve.frontend.http.responses import HttpResponse, error_response, json_response
from marserve.frontend.http.router import HttpRequest, Route
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.rest.predict import Predictor
from marserve.frontend.rest.readiness import is_ready, is_server_ready
from marserve.frontend.version import __version__

_EXPLAIN = {"infer": "False", "explain": "True"}
_EXTENSIONS = ["kserve", "kubeflow"]


def open_inference_route(registry: ModelRegistry, predictor: Predictor, *, whole: bool) -> Route:
    """What answers below ``/v2`` on the inference listener.

    Args:
        registry: Knows the models.
        predictor: Has them predict.
        whole: Whether to offer the whole protocol, or only what predicts.
    """
    if whole:
        return Route(_WholeProtocol(registry, predictor).serve, "inference", _refuse)
    return Route(_Predictions(predictor).serve, "inference")


class _Predictions:
    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    async def serve(self, request: HttpRequest) -> HttpResponse:
        match request.segments:
            case [_, "models", name, verb] if verb in _EXPLAIN:
                return await self._predict(request, name, None, verb)
        raise RouteNotFound

    def _predict(
        self, request: HttpRequest, name: str, version: str | None, verb: str
    ) -> Awaitable[HttpResponse]:
        extra = {"explain": _EXPLAIN[verb]}
        return self._predictor.predict(request, name, version, extra=extra)


class _WholeProtocol(_Predictions):
    def __init__(self, registry: ModelRegistry, predictor: Predictor) -> None:
        super().__init__(predictor)
        self._registry = registry

    async def serve(self, request: HttpRequest) -> HttpResponse:
        match request.segments:
            case [_]:
                return _server_metadata()
            case [_, "health", "live"]:
                return json_response({"live": True})
            case [_, "health", "ready"]:
                return _readiness({}, ready=is_server_ready(self._registry))
            case [_, "models", name, "versions", version, *verb]:
                return await self._ask(request, name, version, verb)
            case [_, "models", name, *verb]:
                return await self._ask(request, name, None, verb)
        raise RouteNotFound

    async def _ask(
        self, request: HttpRequest, name: str, version: str | None, verb: Sequence[str]
    ) -> HttpResponse:
        match verb:
            case []:
                return self._model_metadata(name, version)
            case ["ready"]:
                ready = is_ready(self._registry, self._registry.find(name, version))
                return _readiness({"name": name}, ready=ready)
            case [known] if known in _EXPLAIN:
                return await self._predict(request, name, version, known)
        raise RouteNotFound

    def _model_metadata(self, name: str, version: str | None) -> HttpResponse:
        self._registry.find(name, version)
        return json_response(
            {
                "name": name,
                "versions": [model.version for model in self._registry.versions(name)],
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


def _readiness(about: dict[str, str], *, ready: bool) -> HttpResponse:
    return json_response({**about, "ready": ready}, status=200 if ready else 503)
