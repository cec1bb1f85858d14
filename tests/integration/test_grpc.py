"""gRPC as clients meet it: real servers, processes and sockets."""

import grpc
import pytest
from servers import Server

from marserve.frontend.grpc.messages import load_proto

pytestmark = pytest.mark.integration

INFERENCE = load_proto("inference.proto")
MANAGEMENT = load_proto("management.proto")


def test_ping(server: Server) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_ports['inference']}") as channel:
        call = channel.unary_unary(
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Ping",
            response_deserializer=INFERENCE.messages.TorchServeHealthResponse.FromString,
        )
        print(call(b""))
