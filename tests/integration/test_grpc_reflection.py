"""A client without .proto files and stubs: it asks the server by reflection, as grpcurl does."""

import json
from typing import Any

import grpc
import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

pytestmark = pytest.mark.integration

SECONDS = 20.0
INFERENCE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
MANAGEMENT = "org.pytorch.serve.grpc.management.ManagementAPIsService"
OPEN_INFERENCE = "inference.GRPCInferenceService"
UPSTREAMS_OPEN_INFERENCE = "org.pytorch.serve.grpc.openinference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

ECHO = """
def handle(data, context):
    return None if data is None else [row["body"] for row in data]
"""
DOUBLE = """
def handle(data, context):
    if data is None:
        return None
    return [double(row["body"]["inputs"][0], row["body"]) for row in data]

def double(tensor, request):
    data = [2 * value for value in tensor["data"]]
    return {"model_name": "double", "outputs": [{**tensor, "data": data}]}
"""


class Explorer:
    """What can be learnt from a listener, and asked of it, in the JSON form of its messages."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self._database)

    def services(self) -> set[str]:
        return set(self._database.get_services())

    def describe(self, service: str) -> ServiceDescriptor:
        return self._pool.FindServiceByName(service)

    def call(self, service: str, method: str, **fields: Any) -> dict[str, Any]:
        found = self.describe(service).methods_by_name[method]
        request, answer = map(
            message_factory.GetMessageClass, (found.input_type, found.output_type)
        )
        call = self._channel.unary_unary(
            f"/{service}/{method}", request.SerializeToString, answer.FromString
        )
        told = call(json_format.ParseDict(fields, request()), timeout=SECONDS)
        return json_format.MessageToDict(told, preserving_proto_field_name=True)


@pytest.fixture(scope="module")
def inference(server):
    server.install(ECHO, "echo")
    server.install(DOUBLE, "double")
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_ports['inference']}") as channel:
        yield Explorer(channel)


@pytest.fixture(scope="module")
def management(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_ports['management']}") as channel:
        yield Explorer(channel)


def test_each_listener_lists_what_it_offers(inference, management):
    offered = {INFERENCE, OPEN_INFERENCE, UPSTREAMS_OPEN_INFERENCE, HEALTH}
    assert offered <= inference.services()
    assert MANAGEMENT not in inference.services()
    assert MANAGEMENT in management.services()
    assert INFERENCE not in management.services()


def test_every_service_can_be_described(inference, management):
    for explorer in (inference, management):
        for name in explorer.services():
            service = explorer.describe(name)
            assert service.full_name == name
            for method in service.methods:
                assert method.input_type.full_name
                assert method.output_type.full_name


def test_predictions_without_a_stub(inference):
    answer = inference.call(INFERENCE, "Predictions", model_name="echo", input={"body": "aGVsbG8="})
    assert answer == {"prediction": "aGVsbG8="}


@pytest.mark.parametrize("service", [OPEN_INFERENCE, UPSTREAMS_OPEN_INFERENCE])
def test_inference_of_tensors_without_a_stub(inference, service):
    tensor = {
        "name": "x",
        "datatype": "INT32",
        "shape": [2, 1],
        "contents": {"int_contents": [3, -4]},
    }
    answer = inference.call(service, "ModelInfer", model_name="double", inputs=[tensor])
    (output,) = answer["outputs"]
    assert output["contents"] == {"int_contents": [6, -8]}
    assert output["shape"] == ["2", "1"]  # 64 bits are text in protobuf's JSON


def test_models_are_listed_without_a_stub(inference, management):
    answer = management.call(MANAGEMENT, "ListModels", limit=100)
    names = [model["modelName"] for model in json.loads(answer["msg"])["models"]]
    assert {"echo", "double"} <= set(names)


def test_a_method_that_does_not_exist(inference):
    with pytest.raises(KeyError):
        inference.describe("org.pytorch.serve.grpc.inference.Nothing")
