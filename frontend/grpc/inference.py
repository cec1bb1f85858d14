"""TorchServe's inference service: health, predictions, and predictions in streams.

The inputs of a request are the handler's ``data[i]`` by name, always as bytes. Client metadata
are its headers; TorchServe drops them. The field ``sequence_id`` takes precedence over the header.
Only the body of an answer is sent: the message has no fields for a handler's status and headers.
With ``grpc_handler_status``, an error that the handler set is the status of the call.
"""

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from grpc import StatusCode

from marserve.backend.protocol import Buffer, Input, Part, Prediction
from marserve.frontend.batching.jobs import Stream, StreamBroken
from marserve.frontend.configuration.config import Config
from marserve.frontend.documents import json_text
from marserve.frontend.errors import (
    BadRequest,
    ModelNotFound,
    ModelNotYetLoaded,
    NoWorker,
    QueueFull,
    ServeError,
    VersionNotFound,
)
from marserve.frontend.grpc.calls import Call, Service
from marserve.frontend.grpc.messages import Answers, Message, load_proto
from marserve.frontend.grpc.request_streams import StreamSequences, answer_stream
from marserve.frontend.grpc.statuses import GrpcStatus, number_of, sendable, status_of
from marserve.frontend.operations.open_inference_answers import check_status
from marserve.frontend.operations.predictions import predict
from marserve.frontend.operations.workflows import run_workflow
from marserve.frontend.security.usage import RequestMemory
from marserve.frontend.serving.predict_request import PredictRequest
from marserve.frontend.serving.readiness import is_healthy
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.whole_answers import whole_answer
from marserve.frontend.workflows.workflow import WorkflowRegistry

_INFERENCE = load_proto("inference.proto")
_Response = _INFERENCE.messages.PredictionResponse
_Health = _INFERENCE.messages.TorchServeHealthResponse
_ErrorInfo = load_proto("google/rpc/error_details.proto").messages.ErrorInfo


class ParameterMissing(BadRequest, status=400, wire_type="BadRequestException"):
    """A request names no model, or no sequence."""


def inference_service(
    config: Config, registry: ModelRegistry, workflows: WorkflowRegistry
) -> Service:
    """Return the service, for models, and for workflows where no model has the name."""
    descriptor = _INFERENCE.services["InferenceAPIsService"]
    calls = _Inference(config, registry, workflows)
    return Service(descriptor, calls, "inference", status_of_prediction)


def status_of_prediction(error: ServeError) -> GrpcStatus:
    """Return the status of a failed prediction as in TorchServe: INTERNAL for most errors."""
    status = status_of(error)
    match error:
        case ParameterMissing():
            return GrpcStatus(StatusCode.INTERNAL, error.message, "BadRequestException.()")
        case NoWorker():
            code = status.code if isinstance(error, QueueFull) else StatusCode.INTERNAL
            return GrpcStatus(code, error.message, "InternalServerException.()")
        case ModelNotYetLoaded():
            return status
        case ModelNotFound() | VersionNotFound():
            return status._replace(code=StatusCode.INTERNAL)
    return status


@dataclass(frozen=True)
class _Inference:
    config: Config
    registry: ModelRegistry
    workflows: WorkflowRegistry

    async def ping(self, _request: Message, _call: Call) -> Message:
        status = "Healthy" if is_healthy(self.registry) else "Unhealthy"
        return _Health(health=json_text({"status": status}).rstrip("\n"))

    async def predictions(self, request: Message, call: Call) -> Message:
        """A stream is joined, until the deadline of the call."""
        answer = await self._predict(request, call)
        if isinstance(answer, Stream):
            limit = self.config.max_response_size
            answer = await whole_answer(answer, math.inf, limit, call.memory)
        return self._response(answer, answer.body)

    async def stream_predictions(self, request: Message, call: Call) -> Answers:
        answer = await self._predict(request, call)
        if isinstance(answer, Stream):
            call.follow(answer)
        async with aclosing(self._messages(answer)) as messages:
            async for message in messages:
                yield message

    def stream_predictions2(self, requests: AsyncIterator[Message], call: Call) -> Answers:
        """Answer each request of a stream by messages, or by a message with an error.

        Requests are submitted in their order, and do not wait for each other.
        """
        return answer_stream(partial(self._answers, call=call), requests)

    async def _answers(self, request: Message, call: Call, used: StreamSequences) -> Answers:
        """Send the answers to one request of a stream, and add its sequence to those ``used``."""
        try:
            self._check_sequence(request, call)
            memory = call.receive(request.ByteSize())
            predict_request = self._read(request, call, memory)
            model = self.registry.find(request.model_name, request.model_version or None)
            # Nothing is awaited before, because that could change the order.
            try:
                answer = await model.predict(predict_request)
            finally:
                headers = predict_request.input.headers
                used.add(model, headers.get(self.config.ts_header_key_sequence_id))
            if isinstance(answer, Stream):
                call.follow(answer)
            else:
                memory.hold_answer(len(answer.body))
            async with aclosing(self._messages(answer)) as messages:
                async for message in messages:
                    yield message
        except ServeError as error:
            yield _failed(status_of_prediction(error), request.sequence_id)

    async def _predict(self, request: Message, call: Call) -> Prediction | Stream:
        name, predict_request = request.model_name, self._read(request, call, call.memory)
        try:
            model = self.registry.find(name, request.model_version or None)
        except ModelNotFound:
            if name not in self.workflows or request.model_version:
                raise
            return await run_workflow(self.workflows.find(name), predict_request)
        return await predict(model, predict_request)

    def _read(self, request: Message, call: Call, memory: RequestMemory) -> PredictRequest:
        if not request.model_name:
            raise ParameterMissing("Parameter model_name is required.")
        config = self.config
        if len(request.input) > config.max_form_parts:
            raise BadRequest(f"The request has more than {config.max_form_parts} inputs.")
        headers = call.headers()
        options = call.options(headers)
        if request.HasField("sequence_id") and request.sequence_id:
            headers[config.ts_header_key_sequence_id] = request.sequence_id
        for name in (config.ts_header_key_sequence_start, config.ts_header_key_sequence_end):
            if name in request.input:  # where TorchServe's clients put them
                headers[name] = request.input[name].decode("ascii", "replace")
        parts = [Part(name, "", body) for name, body in request.input.items()]
        input_ = Input(call.new_request_id(), headers, parts)
        by_version = bool(request.model_version)
        return PredictRequest(input_, memory, call.arrived, by_version, options, trace=call.trace)

    def _check_sequence(self, request: Message, call: Call) -> None:
        """Require an id, except for a request that starts a sequence, as in TorchServe."""
        start = self.config.ts_header_key_sequence_start
        named = request.sequence_id or call.metadata(self.config.ts_header_key_sequence_id)
        begins = request.input.get(start, b"").lower() == b"true"
        begins = begins or (call.metadata(start) or "").lower() == "true"
        if not named and not begins:
            raise ParameterMissing("Parameter sequenceId is required.")

    def _response(self, prediction: Prediction, body: Buffer) -> Message:
        if self.config.grpc_handler_status:
            check_status(prediction)
        response = _Response(prediction=bytes(body))
        if prediction.headers:
            sequence = prediction.headers.get(self.config.ts_header_key_sequence_id)
            if sequence:
                response.sequence_id = sequence
        return response

    async def _messages(self, answer: Prediction | Stream) -> Answers:
        if isinstance(answer, Prediction):
            yield self._response(answer, answer.body)
            return
        try:
            async for piece in answer.pieces():
                yield self._response(answer.first, piece)
        except StreamBroken as broken:
            raise ServeError(str(broken)) from broken
        finally:
            answer.close()


def _failed(status: GrpcStatus, sequence_id: str) -> Message:
    response = _Response()
    if sequence_id:
        response.sequence_id = sequence_id
    response.status.code = number_of(status.code)
    response.status.message = sendable(status.message)
    response.status.details.add().Pack(_ErrorInfo(reason=status.reason))
    return response
