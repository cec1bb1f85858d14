"""From a request to a prediction: what all routes that ask a model have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from marserve.backend.protocol import Input
from marserve.frontend.batching.jobs import OnAnswer
from marserve.frontend.http.request_bodies import (
    is_form,
    last_of_each_name,
    plain_input,
    read_input,
)
from marserve.frontend.http.request_options import read_request_options
from marserve.frontend.http.responses import HttpResponse, json_response, prediction_response
from marserve.frontend.http.router import HttpRequest, PlainRequest, Submit
from marserve.frontend.models.predict_request import PredictRequest, Ticket
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.rest.api_description import describe_model_inference
from marserve.frontend.rest.client_lists import read_list

Extra = Mapping[str, str]

_NO_HEADERS: Extra = {}


@dataclass(frozen=True)
class Predictor:
    """Has models predict."""

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
    ) -> HttpResponse:
        """A model's answer to a request; to OPTIONS, how it is to be asked.

        Args:
            request: The request.
            name: Of the model.
            version: None for the default one.
            extra: Headers the server adds for the handler.
            with_query: Whether the handler gets the parameters of the query.
            input_: What `read_input` makes of the request, if it was read already.

        Raises:
            ServeError: There is no such model, a header says what it cannot, or the model failed.
        """
        model = self.registry.find(name, version)
        if request.method == "OPTIONS":
            return json_response(describe_model_inference(name))
        options = read_request_options(request.headers)
        if input_ is None:
            limit = self.max_request_bytes
            input_ = await read_input(request, limit, extra, with_query=with_query)
        predict_request = PredictRequest(input_, request.arrived, version is not None, options)
        if model.settings.batching.splits_lists:
            seats = model.queue.free_seats(options.priority)
            client_list = read_list(input_, model.manifest.envelope, seats)
            if client_list is not None:
                rows = [replace(predict_request, input=row) for row in client_list.rows]
                return client_list.response(await model.predict_all(rows) if rows else ())
        if len(input_.parts) > 1:
            input_.parts = last_of_each_name(input_.parts)
        return prediction_response(await model.predict(predict_request))

    def accept(
        self, request: PlainRequest, name: str, version: str | None, extra: Extra
    ) -> Submit | None:
        """See `Route.accept`: plain are requests of one part, for models that split no lists."""
        if is_form(request.headers.get("content-type", "")):
            return None
        if request.length > self.max_request_bytes:
            return None
        model = self.registry.find(name, version)
        if model.settings.batching.splits_lists:
            return None
        options = read_request_options(request.headers)
        by_version = version is not None

        def submit(body: bytes, on_answer: OnAnswer) -> Ticket:
            input_ = plain_input(request, body, extra)
            predict_request = PredictRequest(input_, request.arrived, by_version, options)
            return model.submit(predict_request, on_answer)

        return submit
