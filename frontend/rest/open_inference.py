"""The Open Inference Protocol over HTTP, and the extensions of Triton that its clients use.

`_OpenInference.serve` has the routes below ``/v2`` where ``ts_open_inference_protocol`` is on; else
there are only predictions, as in TorchServe. The management listener has ``/v2/repository``. Where
all of the protocol is offered, failures have its member ``error`` beside TorchServe's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marserve.backend.protocol import Input
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.errors import BadRequest, MethodNotAllowed, RouteNotFound, ServeError
from marserve.frontend.http.request_bodies import read_decoded
from marserve.frontend.http.requests import HttpRequest, PlainRequest
from marserve.frontend.http.responses import HttpResponse, error_response, json_response
from marserve.frontend.http.router import Route, Submit
from marserve.frontend.operations.open_inference import asked_model, input_of_body
from marserve.frontend.operations.open_inference_models import OpenInferenceModels
from marserve.frontend.operations.tensor_rows import TensorRows
from marserve.frontend.rest.inference import Predictor
from marserve.frontend.rest.parameters import json_object
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.readiness import is_ready, is_server_ready
from marserve.frontend.serving.registry import ModelRegistry

# The headers that the server adds for the handler, by verb.
_VERBS = {"infer": {"explain": "False"}, "explain": {"explain": "True"}}
_HEALTH = ("live", "ready")  # the last segments of paths
_EXTENSIONS = ["kserve", "kubeflow"]
_MAX_BODY = 1 << 16  # of a request that has no tensors


def open_inference_routes(
    registry: ModelRegistry, max_request_bytes: int, *, is_whole: bool
) -> Mapping[str, Route]:
    """Return the routes below ``/v2`` of the inference listener: all, or only predictions."""
    models = OpenInferenceModels(registry)
    protocol = _OpenInference(registry, max_request_bytes, models=models)
    if is_whole:
        health = Route(protocol.serve, "inference", refusal, when_full=True)
        others = Route(protocol.serve, "inference", refusal, accept=protocol.accept_prediction)

        def choose(request: HttpRequest | PlainRequest) -> Route:
            return health if request.segments[-1] in _HEALTH else others

        return {"v2": Route(protocol.serve, choose=choose)}
    accept = protocol.accept_unversioned
    return {"v2": Route(protocol.predictions, "inference", accept=accept)}


def repository_routes(models: OpenInferenceModels) -> Mapping[str, Route]:
    """Return the routes below ``/v2`` of the management listener."""

    async def serve(request: HttpRequest) -> HttpResponse:
        return await _repository(models, request)

    return {"v2": Route(serve, "management", refusal)}


@dataclass(frozen=True)
class _OpenInference(Predictor):
    models: OpenInferenceModels = field(kw_only=True)

    async def predictions(self, request: HttpRequest) -> HttpResponse:
        match request.segments:
            case [_, "models", name, verb] if verb in _VERBS:
                return await self._predict(request, name, None, verb)
        raise RouteNotFound

    def accept_unversioned(self, request: PlainRequest) -> Submit | None:
        match request.segments:
            case [_, "models", name, verb] if verb in _VERBS:
                return self.accept_converted(request, name, None, _VERBS[verb], _converted)
        return None

    def accept_prediction(self, request: PlainRequest) -> Submit | None:
        match request.segments:
            case [_, "models", name, "versions", version, verb] if verb in _VERBS:
                return self.accept_converted(request, name, version, _VERBS[verb], _converted)
        return self.accept_unversioned(request)

    async def serve(self, request: HttpRequest) -> HttpResponse:
        match request.segments:
            case [_]:
                return self._server_metadata()
            case [_, "health", "live"]:
                return json_response({"live": True})
            case [_, "health", "ready"]:
                return readiness_response({}, ready=is_server_ready(self.registry))
            case [_, "repository", *_]:
                return await _repository(self.models, request)
            case [_, "models", "stats"]:
                return json_response(self.models.statistics())
            case [_, "models", name, "versions", version, *verb]:
                return await self._model(request, name, version, verb)
            case [_, "models", name, *verb]:
                return await self._model(request, name, None, verb)
        raise RouteNotFound

    async def _model(
        self, request: HttpRequest, name: str, version: str | None, verb: Sequence[str]
    ) -> HttpResponse:
        match verb:
            case []:
                return json_response(self.models.metadata(name, version))
            case ["ready"]:
                ready = is_ready(self.registry, self.registry.find(name, version))
                return readiness_response({"name": name}, ready=ready)
            case ["config"]:
                return json_response(self.models.config(name, version))
            case ["stats"]:
                return json_response(self.models.statistics(name, version))
            case [predicts] if predicts in _VERBS:
                return await self._predict(request, name, version, predicts)
        raise RouteNotFound

    async def _predict(
        self, request: HttpRequest, name: str, version: str | None, verb: str
    ) -> HttpResponse:
        extra = _VERBS[verb]
        return await self.predict(
            request, name, version, extra=extra, convert=_converted, decodes=True
        )

    def _server_metadata(self) -> HttpResponse:
        metadata = self.models.server_metadata()
        extensions = metadata.pop("extensions")
        # The first is a misspelled member of TorchServe, which its clients may read.
        return json_response({**metadata, "extenstion": _EXTENSIONS, "extensions": extensions})


def _converted(input_: Input, model: ModelVersion) -> Steps[Input | TensorRows]:
    return input_of_body(input_, asked_model(model))


async def _repository(models: OpenInferenceModels, request: HttpRequest) -> HttpResponse:
    match request.segments:
        case [_, "repository", "index"]:
            document = await _read_document(request)
            return json_response(models.index(only_ready=document.get("ready") is True))
        case [_, "repository", "models", _, "load" | "unload"] if request.method != "POST":
            raise MethodNotAllowed
        case [_, "repository", "models", name, "load"]:
            document = await _read_document(request)
            parameters = document.get("parameters") or {}
            if not isinstance(parameters, dict):
                raise BadRequest("parameters must be a JSON object.")
            await models.load(name, parameters)
            return json_response({})
        case [_, "repository", "models", name, "unload"]:
            await _read_document(request)
            await models.unload(name)
            return json_response({})
    raise RouteNotFound


async def _read_document(request: HttpRequest) -> dict[str, Any]:
    """Return the JSON object in a body; an empty body is an empty object."""
    body = await read_decoded(request, _MAX_BODY)
    if not body.strip():
        return {}
    return json_object(body)


def refusal(error: ServeError) -> HttpResponse:
    """Return an error response with KServe's member in addition to TorchServe's."""
    return error_response(error, {"error": error.message or error.wire_type})


def readiness_response(members: Mapping[str, Any], *, ready: bool) -> HttpResponse:
    """Return the ``members`` and whether the model is ready; status 503 if it is not."""
    return json_response({**members, "ready": ready}, status=200 if ready else 503)
