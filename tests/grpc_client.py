"""A gRPC client for the tests, with the messages of frontend/grpc/proto."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from servers import Server

from marserve.frontend.grpc.messages import Message, load_proto, message_class

FILES = {
    "inference": ("inference.proto", "InferenceAPIsService"),
    "management": ("management.proto", "ManagementAPIsService"),
    "open_inference": ("open_inference.proto", "GRPCInferenceService"),
    "health": ("grpc/health/v1/health.proto", "Health"),
}
PredictionsRequest = load_proto("inference.proto").messages.PredictionsRequest
Metadata = Sequence[tuple[str, str | bytes]]


class GrpcClient:
    """Calls the services at one end of a channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def method(self, service: str, name: str) -> Any:
        """What calls a method; takes and gives messages."""
        file, full_name = FILES[service]
        descriptor = load_proto(file).services[full_name]
        method = descriptor.methods_by_name[name]
        kinds = (
            ("stream" if method.client_streaming else "unary"),
            ("stream" if method.server_streaming else "unary"),
        )
        make = getattr(self.channel, "_".join(kinds))
        return make(
            f"/{descriptor.full_name}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_class(method.output_type).FromString,
        )

    def call(
        self,
        called: str,
        name: str,
        /,
        *,
        metadata: Metadata = (),
        timeout: float | None = 20,
        **fields: Any,
    ) -> Any:
        """Call a method with one request; the answer, or an iterator over the answers."""
        file, full_name = FILES[called]
        method = load_proto(file).services[full_name].methods_by_name[name]
        request = message_class(method.input_type)(**fields)
        return self.method(called, name)(request, metadata=metadata, timeout=timeout)

    def predict(self, model: str, body: bytes = b"", **options: Any) -> bytes:
        """A prediction for one input, named ``data``."""
        options.setdefault("input", {"data": body})
        answer = self.call("inference", "Predictions", model_name=model, **options)
        prediction: bytes = answer.prediction
        return prediction

    def stream(self, model: str, body: bytes = b"", **options: Any) -> Any:
        """The answers to one input, as they come."""
        options.setdefault("input", {"data": body})
        return self.call("inference", "StreamPredictions", model_name=model, **options)

    def manage(self, name: str, **fields: Any) -> str:
        """What a management call answers."""
        message: str = self.call("management", name, **fields).msg
        return message


@contextlib.contextmanager
def connected(
    server: Server, listener: str = "inference", credentials: Any = None, **options: Any
) -> Iterator[GrpcClient]:
    """A client of a listener; ``options`` are those of a channel, without ``grpc.``."""
    address = f"127.0.0.1:{server.grpc_ports[listener]}"
    arguments = [(f"grpc.{name}", value) for name, value in options.items()]
    arguments += [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    if credentials is None:
        channel = grpc.insecure_channel(address, arguments)
    else:
        channel = grpc.secure_channel(address, credentials, arguments)
    with channel:
        yield GrpcClient(channel)


def failure(call: Any) -> tuple[str, str]:
    """The name of the code, and the details, with which a call fails."""
    try:
        answer = call()
        if hasattr(answer, "__next__"):
            list(answer)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    raise AssertionError(f"It did not fail: {answer!r}")


def request(model: str, body: bytes = b"", **fields: Any) -> Message:
    """A request of a stream."""
    fields.setdefault("input", {"data": body})
    return PredictionsRequest(model_name=model, **fields)
