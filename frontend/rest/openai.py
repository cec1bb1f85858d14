"""OpenAI's API: the member ``model`` of the body names the model.

    POST /v1/chat/completions, /v1/completions, /v1/responses    an engine's server
    POST /v1/embeddings, /v1/rerank                              also any model that offers them
    GET  /v1/models                                              the models, for KServe too
    GET  /v1/models/{m}                                          in `kserve`

A model with ``openai: server`` gets the body unchanged, as a prediction with this path. Errors have
OpenAI's shape.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from marserve.backend.protocol import Prediction
from marserve.frontend.aio.json_items import text_of
from marserve.frontend.batching.jobs import OnAnswer, Stream
from marserve.frontend.configuration.setting_kinds import Kind
from marserve.frontend.errors import MethodNotAllowed, ModelNotFound, ServeError
from marserve.frontend.http.request_bodies import read_input
from marserve.frontend.http.requests import LARGE_BYTES, HttpRequest, PlainRequest
from marserve.frontend.http.responses import (
    HttpResponse,
    error_response,
    json_response,
    prediction_response,
)
from marserve.frontend.http.router import Route, Submit
from marserve.frontend.operations.openai_models import (
    PATHS,
    find_model,
    full_model,
    list_models,
)
from marserve.frontend.operations.openai_rows import SPLITTERS, read_members
from marserve.frontend.operations.predictions import predict, predict_rows
from marserve.frontend.operations.request_options import read_request_options
from marserve.frontend.rest.inference import Extra, Predictor, accept_plain, unread_request
from marserve.frontend.serving.answer_tasks import AnswerTask
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.predict_request import PredictRequest, Ticket
from marserve.frontend.serving.registry import ModelRegistry

# Longer names would be repeated in an answer.
_NAME = Kind("a name of a model", lambda name: isinstance(name, str) and len(name) <= 1000)
_MODELS = ["v1", "models"]


def with_openai(v1: Route, registry: ModelRegistry, max_request_bytes: int) -> Route:
    """Return the route of ``/v1``; ``v1`` answers what is not OpenAI's."""
    api = _OpenAI(registry, max_request_bytes)
    route = Route(api.serve, "inference", _refusal, accept=api.accept_request)

    def choose(request: HttpRequest | PlainRequest) -> Route:
        if request.segments == _MODELS and request.method != "GET":  # TorchServe's 404
            return v1
        return route if is_openai(request.segments) else v1

    return Route(v1.serve, "inference", choose=choose)


def is_openai(path: Sequence[str]) -> bool:
    """Return whether a path is one of OpenAI's."""
    return path == _MODELS or (path[:1] == ["v1"] and "/".join(path[1:]) in PATHS)


class _OpenAI(Predictor):
    async def serve(self, request: HttpRequest) -> HttpResponse:
        if request.segments == _MODELS:
            return json_response(list_models(self.registry))
        if request.method == "OPTIONS":  # of a browser, before it sends a request
            return HttpResponse(200)
        if request.method != "POST":
            raise MethodNotAllowed
        predict_request = unread_request(request)
        length = request.raw.content_length  # None for chunks, of which there may be many
        if (length is None or length > LARGE_BYTES) and (full := self._full_model(request)):
            full.check(predict_request)  # before the body is read: it can only name a full model
        predict_request.input = await read_input(
            request, self.max_request_bytes, _extra(request), decodes=True
        )
        return prediction_response(await self._answer(predict_request))

    def accept_request(self, request: PlainRequest) -> Submit | None:
        if request.method != "POST" or "content-encoding" in request.headers:
            return None
        if request.length > LARGE_BYTES and self._full_model(request):
            return None

        def submit(predict_request: PredictRequest, on_answer: OnAnswer) -> Ticket:
            answer = partial(self._answer, predict_request)
            return AnswerTask(answer, on_answer, f"A request to {request.target}")

        return accept_plain(request, self.max_request_bytes, submit, extra=_extra(request))

    def _full_model(self, request: HttpRequest | PlainRequest) -> ModelVersion | None:
        priority = read_request_options(request.headers).priority
        return full_model(self.registry, _path(request.segments), priority)

    async def _answer(self, request: PredictRequest) -> Prediction | Stream:
        input_, memory = request.input, request.memory
        input_.parts = [part for part in input_.parts if part.name == "body"][-1:]
        body = text_of(input_.parts[0].body) if input_.parts else b""
        members = await memory.run(read_members(body))
        name = members.read("model", _NAME)
        path = _path(input_.headers["url_path"].split("/"))
        model = find_model(self.registry, name, path)
        request.by_version = name == f"{model.name}:{model.version}"
        model.check(request)
        split = SPLITTERS.get(model.settings.openai)
        if split is None:
            return await predict(model, request)
        copies = model.workers.to_saturate(model.batcher.size)
        rows, join = await memory.run(split(input_, members, model.max_rows, copies))
        return await predict_rows(model, request, rows, join)


def _path(segments: Sequence[str]) -> str:
    """Return the path below /v1."""
    return "/".join(segments[1:])


def _extra(request: HttpRequest | PlainRequest) -> Extra:
    return {"url_path": "/".join(request.segments), "explain": "False"}


def _refusal(error: ServeError) -> HttpResponse:
    is_unknown = error.wire_type == ModelNotFound.wire_type  # which OpenAI's clients compare
    members = {
        "message": error.message or error.wire_type,
        "type": "invalid_request_error" if error.status < 500 else "server_error",
        "param": None,
        "code": "model_not_found" if is_unknown else error.wire_type,
    }
    return replace(error_response(error), body=json.dumps({"error": members}).encode())
