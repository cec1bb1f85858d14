"""The inference listener: /ping and /predictions."""

from collections.abc import Mapping

from marserve.frontend.api.door import Route, Visit
from marserve.frontend.api.inputs import read_input
from marserve.frontend.api.openapi import describe_model_inference
from marserve.frontend.api.outputs import Answer, json_answer, prediction_answer
from marserve.frontend.errors import RouteNotFound
from marserve.frontend.models.registry import ModelRegistry


def inference_routes(registry: ModelRegistry, max_request_bytes: int) -> Mapping[str, Route]:
    """The routes of the inference listener."""
    inference = _Inference(registry, max_request_bytes)
    return {
        "ping": Route(inference.ping, "inference"),
        "predictions": Route(inference.predict, "inference"),
    }


class _Inference:
    def __init__(self, registry: ModelRegistry, max_request_bytes: int) -> None:
        self._registry = registry
        self._max_request_bytes = max_request_bytes

    async def ping(self, _visit: Visit) -> Answer:
        """Healthy while every default version has its minimum of healthy workers."""
        if all(model.workers.is_healthy for model in self._registry.defaults()):
            return json_answer({"status": "Healthy"})
        return json_answer({"status": "Unhealthy"}, status=500)

    async def predict(self, visit: Visit) -> Answer:
        """/predictions/{model}[/{version}[/{path for the handler}]], by any method."""
        _, name, version, *rest = (*visit.segments, "", "")[: max(3, len(visit.segments))]
        if not name:
            raise RouteNotFound
        if visit.request.method == "OPTIONS":
            self._registry.find(name, version or None)
            return json_answer(describe_model_inference(name))
        model = self._registry.find(name, version or None)
        extra = {"url_path": "/".join(rest), "explain": "False"}
        given = await read_input(visit.request, visit.id, self._max_request_bytes, extra)
        # The server's word to the handler: a client must not order a description for its batch.
        given.headers.pop("describe", None)
        prediction = await model.predict(given, visit.arrived, by_version=bool(version))
        return prediction_answer(prediction)
