"""The Open Inference Protocol: tensors, metadata, and the extensions of Triton's clients.

The service has two packages: ``inference`` of the protocol, and that of TorchServe. TorchServe's
service fails with TorchServe's codes, the other with specific ones: NOT_FOUND, UNAVAILABLE,
INVALID_ARGUMENT. On the management listener the service only loads and unloads models.
"""

import asyncio
import math
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.json_format import ParseDict

from marserve.backend.protocol import Input
from marserve.frontend.batching.jobs import Stream, StreamBroken
from marserve.frontend.configuration.config import Config
from marserve.frontend.errors import ServeError
from marserve.frontend.grpc.calls import Call, Service
from marserve.frontend.grpc.inference import ParameterMissing, status_of_prediction
from marserve.frontend.grpc.messages import Answers, Message, load_proto
from marserve.frontend.grpc.request_streams import StreamSequences, answer_stream
from marserve.frontend.grpc.statuses import GrpcStatus, sendable, status_of
from marserve.frontend.grpc.tensor_messages import parameters_of, read_request, write_answer
from marserve.frontend.operations.open_inference import InferRequest, asked_model, input_of
from marserve.frontend.operations.open_inference_answers import (
    InferAnswer,
    UnreadableAnswer,
    answer_of,
    piece_of,
)
from marserve.frontend.operations.open_inference_models import OpenInferenceModels
from marserve.frontend.operations.predictions import predict_rows
from marserve.frontend.operations.tensor_rows import TensorRows
from marserve.frontend.security.usage import RequestMemory
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.predict_request import PredictRequest, Ticket
from marserve.frontend.serving.readiness import is_ready, is_server_ready
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.stateful.model_sequences import SequenceHeaders

_FILE = "open_inference.proto"
_SERVICE = "GRPCInferenceService"
_TORCHSERVES = "org.pytorch.serve.grpc.openinference"
_FINAL = "triton_final_response"
_WANTS_FINAL = "triton_enable_empty_final_response"


def open_inference_services(config: Config, registry: ModelRegistry) -> list[Service]:
    """Return the service in both packages, for the models of a registry."""
    models = OpenInferenceModels(registry)
    names = SequenceHeaders(config).all
    ours = _OpenInference(models, names)
    torchserves = _OpenInference(models, names, _TORCHSERVES)
    descriptor, statuses = (
        torchserves.file.services[_SERVICE],
        {"ModelInfer": status_of_prediction},
    )
    return [
        Service(ours.file.services[_SERVICE], ours, "inference", _plain_status_of),
        Service(descriptor, torchserves, "inference", _torchserves_status_of, statuses),
    ]


def repository_service(models: OpenInferenceModels) -> Service:
    """Return the service of the management listener."""
    file = load_proto(_FILE)
    repository = _Repository(models, file.messages)
    return Service(file.services[_SERVICE], repository, "management", _plain_status_of)


def _plain_status_of(error: ServeError) -> GrpcStatus:
    return status_of(error)._replace(reason="")


def _torchserves_status_of(error: ServeError) -> GrpcStatus:
    if isinstance(error, ParameterMissing):
        return status_of_prediction(error)
    return status_of(error)


class _Health:
    """The calls of both listeners."""

    def __init__(self, models: OpenInferenceModels, messages: Any) -> None:
        self.models = models
        self.messages = messages

    async def server_live(self, _request: Message, _call: Call) -> Message:
        return self.messages.ServerLiveResponse(live=True)

    async def server_ready(self, _request: Message, _call: Call) -> Message:
        """Always true in TorchServe."""
        return self.messages.ServerReadyResponse(ready=is_server_ready(self.models.registry))

    async def server_metadata(self, _request: Message, _call: Call) -> Message:
        return ParseDict(self.models.server_metadata(), self.messages.ServerMetadataResponse())

    async def repository_index(self, request: Message, _call: Call) -> Message:
        index = self.models.index(only_ready=request.ready)
        return ParseDict({"models": index}, self.messages.RepositoryIndexResponse())

    async def repository_model_load(self, request: Message, _call: Call) -> Message:
        await self.models.load(request.model_name, parameters_of(request.parameters))
        return self.messages.RepositoryModelLoadResponse()

    async def repository_model_unload(self, request: Message, _call: Call) -> Message:
        await self.models.unload(request.model_name)
        return self.messages.RepositoryModelUnloadResponse()


class _Repository(_Health):
    async def _refuse(self, _request: Message, _call: Call) -> Message:
        raise ServeError(
            "This address loads and unloads models; use the inference address.", status=501
        )

    model_ready = model_metadata = model_infer = model_config = model_statistics = _refuse

    async def model_stream_infer(self, requests: AsyncIterator[Message], call: Call) -> Answers:
        async for request in requests:
            yield await self._refuse(request, call)


class _Asked(NamedTuple):
    """A request that is read; ``predict`` has the common members of its ``rows``, if any."""

    model: ModelVersion
    request: InferRequest
    predict: PredictRequest
    rows: TensorRows | None = None


class _OpenInference(_Health):
    """The service of the inference listener; ``package`` has its messages."""

    def __init__(
        self, models: OpenInferenceModels, sequence_headers: tuple[str, str, str], package: str = ""
    ) -> None:
        self.file = load_proto(_FILE, package)
        super().__init__(models, self.file.messages)
        self._sequence_headers = sequence_headers

    async def model_ready(self, request: Message, _call: Call) -> Message:
        _require(request.name, "name")
        registry = self.models.registry
        model = registry.find(request.name, request.version or None)
        return self.messages.ModelReadyResponse(ready=is_ready(registry, model))

    async def model_metadata(self, request: Message, _call: Call) -> Message:
        _require(request.name, "model_name")
        metadata = self.models.metadata(request.name, request.version or None)
        return ParseDict(metadata, self.messages.ModelMetadataResponse())

    async def model_config(self, request: Message, _call: Call) -> Message:
        _require(request.name, "model_name")
        config = self.models.config(request.name, request.version or None)
        return ParseDict({"config": config}, self.messages.ModelConfigResponse())

    async def model_statistics(self, request: Message, _call: Call) -> Message:
        statistics = self.models.statistics(request.name, request.version or None)
        return ParseDict(statistics, self.messages.ModelStatisticsResponse())

    async def model_infer(self, message: Message, call: Call) -> Message:
        asked = await self._read(message, call, call.memory)
        answer = await self._predict(asked)
        if isinstance(answer, Stream):
            answer.close()
            raise ServeError(
                f"Model {asked.model.name} answers with a stream; use ModelStreamInfer.", status=501
            )
        return await self._written(answer, asked)

    def model_stream_infer(self, requests: AsyncIterator[Message], call: Call) -> Answers:
        """Answer each request of a stream: a message for each piece of the answer, or an error.

        Requests are submitted in their order, and do not wait for each other.
        """
        answers = partial(self._answers, call=call, order=asyncio.Lock())
        return answer_stream(answers, requests)

    async def _predict(
        self, asked: _Asked, on_ticket: Callable[[Ticket], object] | None = None
    ) -> InferAnswer | Stream:
        """Return the answer, or the stream of its pieces, which the caller closes."""
        model, rows = asked.model, asked.rows
        if rows is not None:
            return await predict_rows(model, asked.predict, rows.rows, rows.joined, on_ticket)
        answer = await model.predict(asked.predict, on_ticket)
        return answer if isinstance(answer, Stream) else answer_of(answer)

    async def _answers(
        self, message: Message, call: Call, order: asyncio.Lock, used: StreamSequences
    ) -> Answers:
        """Send the answers to one request of a stream, and add its sequence to those ``used``."""
        try:
            memory = call.receive(message.ByteSize())
            asked, answer = await self._predict_in_order(message, call, memory, order, used)
            if isinstance(answer, Stream):
                call.follow(answer)
            else:
                memory.hold_answer(answer.size)
            async with aclosing(self._pieces(answer, asked.request)) as pieces:
                async for piece in pieces:
                    before = memory.bytes
                    response = await self._written(piece, asked)
                    yield self.messages.ModelStreamInferResponse(infer_response=response)
                    memory.release(memory.bytes - before)
        except ServeError as error:
            failed = self.messages.ModelStreamInferResponse(error_message=sendable(error.message))
            failed.infer_response.id = message.id
            yield failed

    async def _predict_in_order(
        self,
        message: Message,
        call: Call,
        memory: RequestMemory,
        order: asyncio.Lock,
        used: StreamSequences,
    ) -> tuple[_Asked, InferAnswer | Stream]:
        """Predict; the next request of the stream waits until this one is in the queue."""
        await order.acquire()
        is_queued = False

        def on_ticket(_ticket: Ticket) -> None:
            nonlocal is_queued
            is_queued = True
            order.release()

        try:
            asked = await self._read(message, call, memory)
            try:
                return asked, await self._predict(asked, on_ticket)
            finally:
                used.add(asked.model, asked.predict.input.headers.get(self._sequence_headers[0]))
        finally:
            if not is_queued:
                order.release()

    async def _pieces(
        self, answer: InferAnswer | Stream, request: InferRequest
    ) -> AsyncGenerator[InferAnswer, None]:
        """Yield the pieces of an answer, with a parameter that marks the last one, as in Triton."""
        if isinstance(answer, InferAnswer):
            answer.parameters = {**answer.parameters, _FINAL: True}
            yield answer
            return
        is_final = False
        try:
            async for body in answer.pieces():
                is_final = answer.is_complete
                piece = piece_of(body)
                piece.parameters = {**piece.parameters, _FINAL: is_final}
                yield piece
        except StreamBroken as broken:
            raise ServeError(str(broken)) from broken
        finally:
            answer.close()
        if not is_final and request.head.get("parameters", {}).get(_WANTS_FINAL):
            yield InferAnswer(parameters={_FINAL: True})

    async def _read(self, message: Message, call: Call, memory: RequestMemory) -> _Asked:
        _require(message.model_name, "model_name")
        model = self.models.registry.find(message.model_name, message.model_version or None)
        headers, by_version = call.headers(), bool(message.model_version)
        options, unread = call.options(headers), Input(call.new_request_id(), headers, [])
        predict = PredictRequest(
            unread, memory, call.arrived, by_version, options, trace=call.trace
        )
        model.check(predict)  # before tensors are read, which may take long
        request = await memory.run(read_request(message))
        headers |= self._sequence(request.head.get("parameters", {}))
        made = await memory.run(input_of(request, unread.id, headers, asked_model(model)))
        if isinstance(made, TensorRows):
            return _Asked(model, request, predict, made)
        predict.input = made
        return _Asked(model, request, predict)

    async def _written(self, answer: InferAnswer, asked: _Asked) -> Message:
        model, request, memory = asked.model, asked.request, asked.predict.memory
        answer.id = answer.id or request.head["id"]
        answer.model_name = answer.model_name or model.name
        answer.model_version = answer.model_version or model.version
        if request.is_typed and model.manifest.envelope:  # as the envelope's shapes are in JSON
            for output in answer.outputs:
                output.shape = [math.prod(output.shape)]
        response = self.messages.ModelInferResponse()
        try:
            await memory.run(write_answer(answer, response, is_typed=request.is_typed))
        except (ValueError, TypeError, struct.error) as error:
            # A name that is not UTF-8, or a length beyond 64 bits, which JSON can have.
            raise UnreadableAnswer from error
        return response

    def _sequence(self, parameters: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers of a sequence from the parameters of Triton's clients."""
        sequence = parameters.get("sequence_id")
        if not sequence:
            return {}
        id_, start, end = self._sequence_headers
        flags = {start: "sequence_start", end: "sequence_end"}
        told = {header: "true" for header, name in flags.items() if parameters.get(name) is True}
        return {id_: str(sequence), **told}


def _require(text: str, name: str) -> None:
    if not text:
        raise ParameterMissing(f"Parameter {name} is required.")
