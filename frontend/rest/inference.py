"""The routes of the inference listener: predictions, explanations, health and readiness.

    /ping  /ready                                 health, and whether the server can answer now
    /ready?model={m}[&version={v}]                whether one model can, and is not full
    /predictions/{m}[/{v}[/{path}]]               predict
    /explanations/{m}[/{v}[/{path}]]              explain
    /invocations                                  predict: SageMaker with one model
    /models/{m}/invoke                            predict: SageMaker with several models
    /v1/…  /v2/…                                  in `kserve` and `openai`
    /{m}/predict  /{m}/{v}/predict                predict: Multi Model Server

All methods are allowed. On the paths of SageMaker and Multi Model Server the handler gets the
parameters of the query; /predictions and /explanations ignore them, and add the headers
``url_path`` and ``explain``.
"""

import heapq
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from marserve.backend.protocol import Buffer, Input, Prediction
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.batching.jobs import OnAnswer, Stream
from marserve.frontend.errors import BadRequest, RouteNotFound
from marserve.frontend.http.request_bodies import is_form, plain_input, query_value, read_input
from marserve.frontend.http.requests import LARGE_BYTES, HttpRequest, PlainRequest
from marserve.frontend.http.responses import HttpResponse, json_response, prediction_response
from marserve.frontend.http.router import ANY_OTHER, Route, Submit
from marserve.frontend.operations.predictions import predict, predict_rows
from marserve.frontend.operations.request_options import read_request_options
from marserve.frontend.operations.tensor_rows import TensorRows
from marserve.frontend.rest.api_description import describe_model_inference
from marserve.frontend.serving.answer_tasks import AnswerTask
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.predict_request import PredictRequest, Ticket
from marserve.frontend.serving.readiness import (
    READY,
    is_healthy,
    is_server_ready,
    model_readiness,
    unready,
)
from marserve.frontend.serving.registry import ModelRegistry

#: Returns a model's input of a request, or its rows.
Convert = Callable[[Input, ModelVersion], Steps[Input | TensorRows]]
#: Headers that the server adds for the handler.
Extra = Mapping[str, str]

_NO_HEADERS: Extra = {}
_PLAIN_HEADERS: Extra = {"url_path": "", "explain": "False"}


@dataclass(frozen=True)
class Predictor:
    """Base of the classes whose methods are routes of predictions."""

    registry: ModelRegistry
    max_request_bytes: int

    async def predict(
        self,
        request: HttpRequest,
        name: str,
        version: str | None = None,
        *,
        extra: Extra = _NO_HEADERS,
        with_query: bool = False,
        input_: Input | None = None,
        convert: Convert | None = None,
        decodes: bool = False,
    ) -> HttpResponse:
        """Answer a request with a model's prediction, or OPTIONS with its API description.

        The headers ``extra`` are added for the handler, and the parameters of the query
        ``with_query``. ``input_`` is the result of `read_input`, if the request is read already;
        ``convert`` makes the model's input of it. ``decodes``, the body is read without its
        Content-Encoding.
        """
        model = self.registry.find(name, version)
        if request.method == "OPTIONS":
            return json_response(describe_model_inference(name))
        predict_request = unread_request(request, by_version=version is not None)
        if input_ is None:
            model.check(predict_request)  # before the body is read and parsed, which may take long
            limit = self.max_request_bytes
            input_ = await read_input(request, limit, extra, with_query=with_query, decodes=decodes)
        predict_request.input = input_
        return prediction_response(await _predict(model, predict_request, convert))

    def accept(
        self, request: PlainRequest, name: str, version: str | None, extra: Extra
    ) -> Submit | None:
        """Accept a plain request, for a model that does not split lists (`Route`)."""
        model = self.registry.find(name, version)
        if model.settings.batching.splits_lists or _refuses_unread(model, request):
            return None
        by_version = version is not None
        return accept_plain(request, self.max_request_bytes, model.submit, by_version, extra)

    def accept_converted(
        self, request: PlainRequest, name: str, version: str | None, extra: Extra, convert: Convert
    ) -> Submit | None:
        """Accept a plain request of which ``convert`` makes the model's input (`Route`).

        A body with a Content-Encoding is left to `predict`, which decodes it.
        """
        model = self.registry.find(name, version)
        if "content-encoding" in request.headers or _refuses_unread(model, request):
            return None

        def submit(predict_request: PredictRequest, on_answer: OnAnswer) -> Ticket:
            model.check(predict_request)  # before the body is parsed, which may take long
            answer = partial(_predict, model, predict_request, convert)
            return AnswerTask(answer, on_answer, f"A request to model {name}")

        return accept_plain(request, self.max_request_bytes, submit, version is not None, extra)


def _refuses_unread(model: ModelVersion, request: PlainRequest) -> bool:
    """Return whether a large body need not be received: the model has no room for the request."""
    if request.length <= LARGE_BYTES:
        return False
    return not model.has_room(read_request_options(request.headers).priority)


async def _predict(
    model: ModelVersion, request: PredictRequest, convert: Convert | None
) -> Prediction | Stream:
    if convert is not None:
        converted = await request.memory.run(convert(request.input, model))
        if isinstance(converted, TensorRows):
            return await predict_rows(model, request, converted.rows, converted.join)
        request.input = converted
    return await predict(model, request)


def unread_request(request: HttpRequest, *, by_version: bool = False) -> PredictRequest:
    """Return a request to admit or refuse before its body is read; its input has no parts."""
    options, input_ = read_request_options(request.headers), Input(request.id, {}, [])
    memory, trace = request.memory, request.trace
    return PredictRequest(input_, memory, request.arrived, by_version, options, trace=trace)


def accept_plain(
    request: PlainRequest,
    max_bytes: int,
    submit_to: Callable[[PredictRequest, OnAnswer], Ticket],
    by_version: bool = False,
    extra: Extra = _NO_HEADERS,
) -> Submit | None:
    """Accept a plain request whose body is one part of at most ``max_bytes`` (`Route`)."""
    if is_form(request.headers.get("content-type", "")) or request.length > max_bytes:
        return None
    options = read_request_options(request.headers)

    def submit(body: Buffer, on_answer: OnAnswer) -> Ticket:
        input_ = plain_input(request, body, extra)
        memory, trace = request.connection.memory, request.trace
        asked = PredictRequest(input_, memory, request.arrived, by_version, options, trace=trace)
        return submit_to(asked, on_answer)

    return submit


def inference_routes(registry: ModelRegistry, max_request_bytes: int) -> Mapping[str, Route]:
    """Return the routes of the inference listener, except those of `kserve` and `workflows`."""
    inference = _Inference(registry, max_request_bytes)
    return {
        "ping": Route(inference.ping, "inference", when_full=True),
        "ready": Route(inference.ready, when_full=True),  # a probe has no key
        "predictions": Route(
            inference.predictions, "inference", accept=inference.accept_prediction
        ),
        "explanations": Route(inference.explanations, "inference"),
        "invocations": Route(
            inference.invocations, "inference", accept=inference.accept_invocation
        ),
        "models": Route(inference.invoke, "inference", accept=inference.accept_invoke),
        ANY_OTHER: Route(inference.legacy, "inference"),
    }


def server_readiness(registry: ModelRegistry) -> HttpResponse:
    """Return whether every model can answer: 200, or 503 with at most 100 names."""
    if registry.is_leaving:
        return json_response({"status": "Stopping"}, status=503)
    progress = registry.catalog_progress
    catalog = {"catalog": progress.trouble} if progress.trouble else {}
    if is_server_ready(registry):
        return json_response({"status": "Ready", **catalog})
    waiting = {"models": heapq.nsmallest(100, unready(registry))}
    return json_response({"status": "Not ready", **waiting, **catalog}, status=503)


class _Inference(Predictor):
    async def ping(self, _request: HttpRequest) -> HttpResponse:
        if is_healthy(self.registry):
            return json_response({"status": "Healthy"})
        return json_response({"status": "Unhealthy"}, status=500)

    async def ready(self, request: HttpRequest) -> HttpResponse:
        if len(request.segments) > 1:
            raise RouteNotFound
        if name := query_value(request, "model"):
            return self._model_ready(request, name, query_value(request, "version"))
        return server_readiness(self.registry)

    def _model_ready(self, request: HttpRequest, name: str, version: str) -> HttpResponse:
        model = self.registry.find(name, version or None)
        found = model_readiness(self.registry, model, request.connection.share_in_flight)
        document = {"status": found.status, "model": name, "reason": found.reason or None}
        if found.status == READY:
            return json_response(document)
        return json_response(document, 503, {"retry-after": str(found.retry_after)})

    def predictions(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        return self._by_path(request, explain="False")

    def accept_prediction(self, request: PlainRequest) -> Submit | None:
        match request.segments:
            case [_, name, *rest] if name:
                version, extra = (rest[0] if rest else ""), _PLAIN_HEADERS
                if len(rest) > 1:
                    extra = {**extra, "url_path": "/".join(rest[1:])}
                return self.accept(request, name, version or None, extra)
        return None

    def explanations(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        return self._by_path(request, explain="True")

    def _by_path(self, request: HttpRequest, explain: str) -> Awaitable[HttpResponse]:
        segments = request.segments
        if len(segments) < 2 or not segments[1]:
            raise RouteNotFound
        version = segments[2] if len(segments) > 2 else ""
        extra = {"url_path": "/".join(segments[3:]), "explain": explain}
        return self.predict(request, segments[1], version or None, extra=extra)

    async def invocations(self, request: HttpRequest) -> HttpResponse:
        """The query, the only model loaded at start, or a form names the model."""
        if len(request.segments) > 1:
            raise RouteNotFound
        name = query_value(request, "model_name") or self._only_model()
        if name:
            return await self.predict(request, name, with_query=True)
        input_ = await read_input(request, self.max_request_bytes, {}, with_query=True)
        return await self.predict(request, _model_name_in(input_), input_=input_)

    def accept_invocation(self, request: PlainRequest) -> Submit | None:
        if len(request.segments) > 1 or "?" in request.target or not (name := self._only_model()):
            return None
        return self.accept(request, name, None, _NO_HEADERS)

    def _only_model(self) -> str:
        at_start = {model.name for model in self.registry if model.origin.at_start}
        return at_start.pop() if len(at_start) == 1 else ""

    def accept_invoke(self, request: PlainRequest) -> Submit | None:
        match request.segments:
            case [_, name, "invoke"] if "?" not in request.target:
                return self.accept(request, name, None, _NO_HEADERS)
        return None

    def invoke(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        match request.segments:
            case [_, name, "invoke"]:
                return self.predict(request, name, with_query=True)
        raise RouteNotFound

    def legacy(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        match request.segments:
            case [name, "predict"]:
                return self.predict(request, name, with_query=True)
            case [name, version, "predict"]:
                return self.predict(request, name, version, with_query=True)
        raise RouteNotFound


def _model_name_in(input_: Input) -> str:
    for part in reversed(input_.parts):
        if part.name == "model_name" and part.body:
            return bytes(part.body).decode("utf-8", "replace")
    raise BadRequest("Parameter model_name is required.")
