"""From a visit to a prediction: what all routes that ask a model have in common."""

from collections.abc import Awaitable, Mapping
from dataclasses import replace

from aiohttp.hdrs import CONTENT_LENGTH, CONTENT_TYPE, EXPECT

from marserve.backend.protocol import Input
from marserve.frontend.batching.jobs import OnAnswer
from marserve.frontend.errors import PayloadTooLarge
from marserve.frontend.http.express import Whole
from marserve.frontend.http.request_bodies import (
    is_form,
    last_of_each_name,
    plain_input,
    read_input,
)
from marserve.frontend.http.request_options import read_request_options
from marserve.frontend.http.responses import Answer, json_answer, prediction_answer
from marserve.frontend.http.router import HttpRequest
from marserve.frontend.models.predict_request import PredictRequest, Ticket
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.rest.api_description import describe_model_inference
from marserve.frontend.rest.client_lists import read_list

Extra = Mapping[str, str]

_NO_HEADERS: Extra = {}
# OPTIONS asks how to ask, and HEAD is answered without a body.
_QUESTIONS = ("OPTIONS", "HEAD")


class Predictor:
    """Has models predict.

    Args:
        registry: Knows the models.
        max_request_bytes: Longest request body allowed.
    """

    def __init__(self, registry: ModelRegistry, max_request_bytes: int) -> None:
        self._registry = registry
        self._max_request_bytes = max_request_bytes

    async def predict(
        self,
        visit: HttpRequest,
        name: str,
        version: str | None = None,
        *,
        extra: Mapping[str, str] = _NO_HEADERS,
        with_query: bool = False,
        given: Input | None = None,
    ) -> Answer:
        """A model's answer to a request; to OPTIONS, how it is to be asked.

        Args:
            visit: The request.
            name: Of the model.
            version: Of the model; None for the default one.
            extra: Headers the server adds for the handler.
            with_query: Whether the handler gets the parameters of the query.
            given: What the request brings, if it was read already.

        Raises:
            ModelNotFound, VersionNotFound: There is none.
            BadRequest: A header says what it cannot.
            ServeError: What became of the request instead.
        """
        model = self._registry.find(name, version)
        if visit.request.method == "OPTIONS":
            return json_answer(describe_model_inference(name))
        options = read_request_options(visit.request.headers)
        if given is None:
            given = await self.read(visit, extra=extra, with_query=with_query)
        request = PredictRequest(given, visit.arrived, version is not None, options)
        if model.settings.batching.splits_lists:
            most = model.queue.free_seats(options.priority)
            listed = read_list(given, model.manifest.envelope, most)
            if listed is not None:
                rows = [replace(request, input=row) for row in listed.rows]
                return listed.answer(await model.predict_all(rows) if rows else ())
        if len(given.parts) > 1:
            given.parts = last_of_each_name(given.parts)
        return prediction_answer(await model.predict(request))

    def submit(
        self, request: Whole, on_answer: OnAnswer, name: str, version: str | None, extra: Extra
    ) -> Ticket | None:
        """Queue a plain request for a model.

        Args:
            request: The request.
            on_answer: Called with the answer.
            name: Of the model.
            version: Of the model; None for the default one.
            extra: Headers the server adds for the handler.

        Returns:
            None if it is not plain: a form, a question, a list of rows, a body without a length;
            nothing has happened then.

        Raises:
            ModelNotFound, VersionNotFound, PayloadTooLarge, BadRequest: See `predict`.
            ServeError: The model does not take it.
        """
        headers = request.message.headers
        content_type = headers.get(CONTENT_TYPE, "")
        if request.message.method in _QUESTIONS or is_form(content_type):
            return None
        if CONTENT_LENGTH not in headers or EXPECT in headers:  # what handlers see would differ
            return None
        model = self._registry.find(name, version)
        if model.settings.batching.splits_lists:
            return None
        options = read_request_options(headers)
        body = request.body.read_nowait()
        if len(body) > self._max_request_bytes:
            raise PayloadTooLarge(self._max_request_bytes)
        given = plain_input(request.message.raw_headers, content_type, body, request.id, extra)
        return model.submit(
            PredictRequest(given, request.arrived, version is not None, options), on_answer
        )

    def read(
        self,
        visit: HttpRequest,
        *,
        extra: Mapping[str, str] = _NO_HEADERS,
        with_query: bool = False,
    ) -> Awaitable[Input]:
        """What a request brings for its handler; see `read_input`."""
        limit = self._max_request_bytes
        return read_input(visit.request, visit.id, limit, extra, with_query=with_query)
