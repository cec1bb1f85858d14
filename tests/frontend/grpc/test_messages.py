"""Messages and services of the .proto files."""

import proto_descriptors

from marserve.frontend.grpc.messages import load_proto


def test_the_descriptors_are_those_of_the_files():
    """If not: python tests/proto_descriptors.py"""
    assert proto_descriptors.compiled() == proto_descriptors.DESCRIPTORS.read_bytes()


def test_the_open_inference_protocol_is_there_in_the_package_of_torchserve():
    copy = load_proto("open_inference.proto", proto_descriptors.TORCHSERVES)
    assert copy.services["GRPCInferenceService"].full_name == (
        "org.pytorch.serve.grpc.openinference.GRPCInferenceService"
    )
    assert copy.messages.ModelInferRequest is not (
        load_proto("open_inference.proto").messages.ModelInferRequest
    )
