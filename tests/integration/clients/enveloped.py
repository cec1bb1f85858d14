"""Asks for a model whose handler is in the envelope kservev2; see `checks`."""

import numpy as np
import tritonclient.grpc
import tritonclient.http
from checks import EVERY_DATATYPE, check_raises, run_checks
from tritonclient.grpc import service_pb2


def ask_all(library, client):
    for datatype, values in EVERY_DATATYPE.items():
        if datatype == "BYTES":
            values = np.array([b"tabby"], object)  # of more the envelope takes the first
        given = library.InferInput("x", list(values.shape), datatype)
        given.set_data_from_numpy(values)
        answer = client.infer("m", [given], request_id="7")
        found = answer.as_numpy("x")
        if datatype == "BYTES":
            assert found == b"tabby"
        else:
            assert found.shape == values.shape, datatype
            wanted = values.astype("float64") if datatype != "BOOL" else values
            np.testing.assert_array_equal(found.astype(wanted.dtype), wanted, datatype)
    lying = library.InferInput("x", [2], "FP32")
    lying.set_data_from_numpy(np.float32([1, 2]))
    lying.set_shape([3])
    check_raises(lambda: client.infer("m", [lying]), "x")


def check_http(inference):
    with tritonclient.http.InferenceServerClient(inference) as client:
        ask_all(tritonclient.http, client)


def check_grpc(grpc_inference):
    with tritonclient.grpc.InferenceServerClient(grpc_inference) as client:
        ask_all(tritonclient.grpc, client)


def check_typed(grpc_inference):
    """As TorchServe's own clients ask, and with the shapes that they know."""
    request = service_pb2.ModelInferRequest(model_name="m", id="7")
    given = request.inputs.add(name="x", datatype="FP32", shape=[2, 2])
    given.contents.fp32_contents.extend([1, 2, 3, 4])
    text = request.inputs.add(name="name", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"tabby")
    with tritonclient.grpc.InferenceServerClient(grpc_inference) as client:
        response = client._client_stub.ModelInfer(request)
    numbers, text = response.outputs
    assert (response.id, response.model_name, response.model_version) == (
        "7",
        "archive-of-m",
        "1.0",
    )
    assert (numbers.name, numbers.datatype, list(numbers.shape)) == ("x", "FP64", [4])
    assert list(numbers.contents.fp64_contents) == [1, 2, 3, 4]
    assert list(text.contents.bytes_contents) == [b"dGFiYnk="]


if __name__ == "__main__":
    run_checks(globals(), None)
