"""The inference listener: every path that leads to a prediction, and how the server is.

    /ping  /ready                                 its health, and whether it can answer now
    /predictions/{m}[/{v}[/{path}]]               predict
    /explanations/{m}[/{v}[/{path}]]              explain
    /invocations                                  predict, as SageMaker asks one model
    /models/{m}/invoke                            the same, of one of several models
    /v1/…  /v2/…                                  see `kserve`
    /{m}/predict  /{m}/{v}/predict                as clients of Multi Model Server ask

Any method will do. Where SageMaker or Multi Model Server ask, the handler gets the query's
parameters; /predictions and /explanations ignore them, and add ``url_path`` and ``explain``.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

from marserve.backend.protocol import Input
from marserve.frontend.errors import BadRequest, RouteNotFound
from marserve.frontend.http.request_bodies import query_value, read_input
from marserve.frontend.http.responses import HttpResponse, json_response
from marserve.frontend.http.router import ANY_OTHER, HttpRequest, PlainRequest, Route, Submit
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.rest.kserve import kserve_routes
from marserve.frontend.rest.predict import Predictor
from marserve.frontend.rest.readiness import unready
from marserve.frontend.rest.shared_routes import refuse_workflow

# The headers of a plain prediction that the server adds for the handler.
_PREDICT = {"url_path": "", "explain": "False"}


def inference_routes(
    registry: ModelRegistry, max_request_bytes: int, *, open_inference: bool = False
) -> Mapping[str, Route]:
    """The routes of the inference listener; with all of the Open Inference Protocol, or without."""
    predictor = Predictor(registry, max_request_bytes)
    inference = _Inference(registry, predictor)
    return {
        "ping": Route(inference.ping, "inference"),
        "ready": Route(inference.ready),  # a probe has no token
        "predictions": Route(
            inference.predictions, "inference", accept=inference.accept_prediction
        ),
        "explanations": Route(inference.explanations, "inference"),
        "invocations": Route(inference.invocations, "inference"),
        "models": Route(inference.invoke, "inference"),
        **kserve_routes(registry, predictor, open_inference=open_inference),
        "wfpredict": Route(refuse_workflow, "inference"),
        ANY_OTHER: Route(inference.legacy, "inference"),
    }


@dataclass(frozen=True)
class _Inference:
    registry: ModelRegistry
    predictor: Predictor

    async def ping(self, _request: HttpRequest) -> HttpResponse:
        """Healthy while every default version has its minimum of healthy workers."""
        if not self.registry.is_leaving and all(
            model.workers.is_healthy for model in self.registry.defaults()
        ):
            return json_response({"status": "Healthy"})
        return json_response({"status": "Unhealthy"}, status=500)

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """Whether every default version can answer now with its minimum of workers."""
        if len(request.segments) > 1:
            raise RouteNotFound
        if self.registry.is_leaving:
            return json_response({"status": "Stopping"}, status=503)
        waiting = unready(self.registry)
        if not waiting:
            return json_response({"status": "Ready"})
        return json_response({"status": "Not ready", "models": waiting}, status=503)

    def predictions(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        """/predictions/{model}[/{version}[/{path for the handler}]]."""
        return self._by_path(request, explain="False")

    def accept_prediction(self, request: PlainRequest) -> Submit | None:
        """The same for the fast path; see `Route.accept`."""
        match request.segments:
            case [_, name]:
                version = None
            case [_, name, version] if name:
                pass
            case _:
                return None
        return self.predictor.accept(request, name, version or None, _PREDICT)

    def explanations(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        """/explanations, of the same shape."""
        return self._by_path(request, explain="True")

    def _by_path(self, request: HttpRequest, explain: str) -> Awaitable[HttpResponse]:
        segments = request.segments
        if len(segments) < 2 or not segments[1]:
            raise RouteNotFound
        version = segments[2] if len(segments) > 2 else ""
        extra = {"url_path": "/".join(segments[3:]), "explain": explain}
        return self.predictor.predict(request, segments[1], version or None, extra=extra)

    async def invocations(self, request: HttpRequest) -> HttpResponse:
        """/invocations: the model is in the query, the only one since the start, or in a form."""
        if len(request.segments) > 1:
            raise RouteNotFound
        name = query_value(request, "model_name") or self._single_model_at_start()
        if name:
            return await self.predictor.predict(request, name, with_query=True)
        limit = self.predictor.max_request_bytes
        input_ = await read_input(request, limit, {}, with_query=True)
        return await self.predictor.predict(request, _model_name_in(input_), input_=input_)

    def _single_model_at_start(self) -> str:
        names = {model.name for model in self.registry if model.loaded_at_start}
        return names.pop() if len(names) == 1 else ""

    def invoke(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        """/models/{model}/invoke."""
        match request.segments:
            case [_, name, "invoke"]:
                return self.predictor.predict(request, name, with_query=True)
        raise RouteNotFound

    def legacy(self, request: HttpRequest) -> Awaitable[HttpResponse]:
        """/{model}/predict and /{model}/{version}/predict."""
        match request.segments:
            case [name, "predict"]:
                return self.predictor.predict(request, name, with_query=True)
            case [name, version, "predict"]:
                return self.predictor.predict(request, name, version, with_query=True)
        raise RouteNotFound


def _model_name_in(input_: Input) -> str:
    for part in reversed(input_.parts):
        if part.name == "model_name" and part.body:
            return bytes(part.body).decode("utf-8", "replace")
    raise BadRequest("Parameter model_name is required.")
