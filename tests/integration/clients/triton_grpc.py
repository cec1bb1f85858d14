"""tritonclient.grpc, as it is on PyPI, asks a server; see `checks` for how it is run."""

import queue
import time

import grpc
import numpy as np
from checks import EVERY_DATATYPE, check_raises, run_checks
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, service_pb2


def tensor(name, values, datatype="FP32"):
    if isinstance(values, list):
        values = np.array(values, "float32")
    given = InferInput(name, list(values.shape), datatype)
    given.set_data_from_numpy(values)
    return given


def word(kind):
    return [tensor("x", np.array([kind.encode()], object), "BYTES")]


def check_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert client.is_model_ready("echo", "1.0")
    check_raises(lambda: client.is_model_ready("nobody"), "NOT_FOUND")
    metadata = client.get_server_metadata()
    assert (metadata.name, "statistics" in metadata.extensions) == ("Torchserve", True)
    metadata = client.get_model_metadata("plain-declared")
    assert list(metadata.versions) == ["1.0"]
    (given,) = metadata.inputs
    assert (given.name, given.datatype, list(given.shape)) == ("x", "FP32", [-1, 3])
    assert client.get_model_metadata("echo", as_json=True)["name"] == "echo"


def check_configuration_and_statistics(client):
    config = client.get_model_config("plain-declared").config
    assert config.max_batch_size == 0
    assert config.input[0].data_type == 11
    assert list(config.input[0].dims) == [-1, 3]
    assert config.output[0].data_type == 13
    assert config.instance_group[0].count == 1
    assert config.instance_group[0].kind == 2
    before = client.get_inference_statistics("label").model_stats[0]
    for _ in range(3):
        client.infer("label", [tensor("x", [1.0])])
    after = client.get_inference_statistics("label", "1.0").model_stats[0]
    assert after.inference_count - before.inference_count == 3
    assert after.inference_stats.success.count == after.inference_count
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    assert len(client.get_inference_statistics().model_stats) > 5


def check_the_index(client):
    index = {each.name: each for each in client.get_model_repository_index().models}
    assert (index["echo"].version, index["echo"].state) == ("1.0", "READY")
    check_raises(lambda: client.load_model("echo"), "management address")
    check_raises(lambda: client.unload_model("echo"), "management address")


def check_loading(client, grpc_management):
    with InferenceServerClient(grpc_management) as manager:
        assert manager.is_server_live()
        manager.load_model("later")
        assert client.is_model_ready("later")
        manager.unload_model("later")
        check_raises(lambda: client.is_model_ready("later"), "NOT_FOUND")
        for _ in range(5):  # each starts processes, beside the threads of grpc
            check_raises(lambda: manager.load_model("nothing"), "not found in the model store")
        check_raises(lambda: manager.load_model("later", config="{}"), "'config' is not supported")
        check_raises(lambda: manager.unload_model("nothing"), "Model not found: nothing")
        check_raises(lambda: manager.infer("echo", [tensor("x", [1.0])]), "UNIMPLEMENTED")


def check_every_datatype(client):
    for datatype, values in EVERY_DATATYPE.items():
        answer = client.infer("echo", [tensor("x", values, datatype)], request_id="7")
        response = answer.get_response()
        assert (response.id, response.model_name, response.model_version) == ("7", "echo", "1.0")
        assert answer.get_output("x").datatype == datatype
        found = answer.as_numpy("x")
        assert found.shape == values.shape, datatype
        if datatype == "BF16":  # of which numpy does not know what is a number
            found, values = found.astype("float32"), values.astype("float32")
        np.testing.assert_array_equal(found, values, datatype)


FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def typed(values, datatype, model="echo", shape=None):
    request = service_pb2.ModelInferRequest(model_name=model)
    given = request.inputs.add(name="x", datatype=datatype)
    given.shape.extend(values.shape if shape is None else shape)
    getattr(given.contents, FIELDS[datatype]).extend(values.flatten().tolist())
    return request


def check_typed_contents(client):
    """Those of tritonclient are raw; with its messages others can be sent."""
    for datatype, field in FIELDS.items():
        values = EVERY_DATATYPE[datatype]
        if datatype == "BYTES":  # which arrive in base64, as TorchServe's handlers know it
            values = np.array([b"tabby", b"\xff"], object)
        response = client._client_stub.ModelInfer(typed(values, datatype))
        (output,) = response.outputs
        assert not response.raw_output_contents
        found = list(getattr(output.contents, field))
        if datatype == "BYTES":
            assert found == [b"dGFiYnk=", b"/w=="]
        else:
            np.testing.assert_array_equal(np.array(found), values.flatten(), datatype)
        assert list(output.shape) == list(values.shape)
    response = client._client_stub.ModelInfer(typed(np.arange(100_000), "INT64", "plain"))
    assert list(response.outputs[0].contents.int64_contents) == list(range(0, 200_000, 2))
    response = client._client_stub.ModelInfer(typed(np.float32([1, 2]), "FP32", "arrays"))
    assert [output.datatype for output in response.outputs] == ["FP32", "BF16", "BYTES"]
    assert len(response.raw_output_contents) == 3  # since BF16 has no field


def check_torchserves_name_and_codes(grpc_inference):
    """The same service as TorchServe calls it, with TorchServe's codes."""
    messages = service_pb2
    with grpc.insecure_channel(grpc_inference) as channel:

        def call(method, request, answer):
            path = f"/org.pytorch.serve.grpc.openinference.GRPCInferenceService/{method}"
            ask = channel.unary_unary(path, type(request).SerializeToString, answer.FromString)
            return ask(request, timeout=10)

        def infer(**fields):
            request = typed(np.int32([1, 2]), "INT32", **fields)
            return call("ModelInfer", request, messages.ModelInferResponse)

        def ready(name):
            request = messages.ModelReadyRequest(name=name)
            return call("ModelReady", request, messages.ModelReadyResponse)

        assert ready("echo").ready
        (output,) = infer(model="plain").outputs
        assert list(output.contents.int64_contents) == [2, 4]
        for ask, code, text in (
            (lambda: infer(model="nobody"), "INTERNAL", "Model not found: nobody"),
            (
                lambda: infer(model=""),
                "INTERNAL",
                "model_name is required.\nBadRequestException.()",
            ),
            (lambda: ready("nobody"), "NOT_FOUND", "archive.model.ModelNotFoundException"),
            (lambda: ready(""), "INTERNAL", "Parameter name is required.\nBadRequestException.()"),
        ):
            check_raises(ask, f"StatusCode.{code}")
            check_raises(ask, text)


def check_asynchronous_and_outputs(client):
    answers = queue.Queue()
    for n in range(20):
        client.async_infer(
            "plain",
            [tensor("x", [float(n)])],
            callback=lambda result, error, n=n: answers.put((n, result, error)),
            outputs=[InferRequestedOutput("y")],
        )
    for n, result, error in [answers.get(timeout=20) for _ in range(20)]:
        assert error is None
        assert result.as_numpy("y").tolist() == [2.0 * n]
    answer = client.infer("arrays", [tensor("x", [1.0, 2.5])], parameters={"any": 5})
    assert answer.as_numpy("doubled").tolist() == [2.0, 5.0]
    assert answer.as_numpy("half").tolist() == [1.0, 2.5]
    assert answer.as_numpy("labels").tolist() == [b"1.0", b"2.5"]
    answer = client.infer("label", [tensor("x", [1.0])], compression_algorithm="gzip")
    assert answer.as_numpy("output-0").tolist() == [b'{"tabby": 0.75, "tiger_cat": 0.25}']


def check_a_stream(client):
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("pieces", [tensor("x", [1.0, 2.0, 3.0])], request_id="a")
    found = [answers.get(timeout=20) for _ in range(3)]
    assert [error for _, error in found] == [None] * 3
    assert [result.as_numpy("output-0").tolist() for result, _ in found] == [[1.0], [2.0], [3.0]]
    finals = [
        result.get_response().parameters["triton_final_response"].bool_param for result, _ in found
    ]
    assert finals == [False, False, True]
    client.async_stream_infer("nobody", [tensor("x", [1.0])], request_id="b")
    _, error = answers.get(timeout=20)
    assert "Model not found: nobody" in str(error)
    for n in range(30):
        client.async_stream_infer("plain", [tensor("x", [float(n)])], request_id=str(n))
    found = {
        result.get_response().id: result.as_numpy("output-0")[0]
        for result, _ in [answers.get(timeout=20) for _ in range(30)]
    }
    assert found == {str(n): 2.0 * n for n in range(30)}
    client.stop_stream()
    check_raises(lambda: client.infer("pieces", [tensor("x", [1.0, 2.0])]), "ModelStreamInfer")
    assert client.infer("pieces", [tensor("x", [1.0])]).as_numpy("output-0") == [1.0]


def check_what_tells_of_a_sequence(client):
    given = [tensor("x", [1.0])]
    for sequence in (5, "five"):
        answer = client.infer("sequence", given, sequence_id=sequence, sequence_start=True)
        told = [each.decode() for each in answer.as_numpy("output-0")]
        assert told == [str(sequence), "true", "None"]
    told = client.infer("sequence", given).as_numpy("output-0").tolist()
    assert told == [b"None", b"None", b"None"]


def check_a_deadline(client):
    started = time.monotonic()
    given = [tensor("x", [1.0])]
    check_raises(lambda: client.infer("slow", given, client_timeout=0.2), "DEADLINE_EXCEEDED")
    assert time.monotonic() - started < 1
    call = client.async_infer("slow", given, callback=lambda _result, _error: None)
    call.cancel()
    assert client.infer("slow", [tensor("x", [0.0])]).as_numpy("output-0") == [1.0]


def check_a_handler_that_declares_and_takes_arrays(client):
    answer = client.infer("declaring", [tensor("x", np.float32([[1, 2], [3, 4]]))])
    assert answer.as_numpy("y0").tolist() == [4.0, 6.0]
    assert answer.as_numpy("y1").tolist() == [2.0, 4.0]
    metadata = client.get_model_metadata("declaring")
    outputs = metadata["outputs"] if isinstance(metadata, dict) else metadata.outputs
    assert len(outputs) == 2


def check_what_is_wrong_is_said(client):
    def ask(model="echo", values=(1.0,), **options):
        return lambda: client.infer(model, [tensor("x", list(values))], **options)

    check_raises(ask("nobody"), "[StatusCode.NOT_FOUND] Model not found: nobody")
    check_raises(ask(model_version="9"), "Model version: 9 does not exist for model: echo")
    check_raises(
        ask("arrays", outputs=[InferRequestedOutput("z")]),
        "[StatusCode.INVALID_ARGUMENT] There is no output 'z'; the handler gave doubled",
    )
    asked = [InferRequestedOutput("y", class_count=2)]
    check_raises(ask("plain", outputs=asked), "classification extension is not supported")
    for kind, sentence in {
        "raises": "[StatusCode.UNAVAILABLE] Prediction failed",
        "refuses": "[StatusCode.FAILED_PRECONDITION] no cats in it",
        "shape": "output 'y' has 3 elements; its shape is [2, 2]",
        "datatype": "'FP128', which the protocol does not have",
        "range": "output 'y' has a value that is no INT8",
    }.items():
        check_raises(lambda kind=kind: client.infer("wrong", word(kind)), sentence)
    lying = tensor("x", [1.0, 2.0])
    lying.set_shape([3])
    check_raises(lambda: client.infer("echo", [lying]), "its shape [3] wants 3 FP32")
    shared = InferInput("x", [1], "FP32")
    shared.set_shared_memory("region", 4)
    check_raises(lambda: client.infer("echo", [shared]), "Shared memory is not supported")
    check_raises(lambda: client.infer("echo", []), "at least one input")
    numbers = np.array([300])
    stub = client._client_stub
    check_raises(lambda: stub.ModelInfer(typed(numbers, "UINT8")), "has a value that is no UINT8")
    check_raises(lambda: stub.ModelInfer(typed(numbers, "INT8", shape=[2**62] * 3)), "no INT8")
    for shape in ([2**62] * 3, [-5], [1] * 1000):
        check_raises(
            lambda shape=shape: stub.ModelInfer(typed(np.array([3]), "INT8", shape=shape)),
            "INVALID_ARGUMENT",
        )
    both = typed(np.array([3]), "INT8")
    both.raw_input_contents.append(b"\3")
    check_raises(lambda: stub.ModelInfer(both), "has contents and raw_input_contents")
    for raw, datatype, sentence in (
        ([b"\3", b"\4"], "INT8", "There are 1 inputs, and raw_input_contents has 2"),
        ([b"\3\4"], "INT8", "has 2 bytes"),
        ([b"\3"], "FP128", "has the datatype 'FP128'"),
        ([b"\xff\xff\xff\xff"], "BYTES", "longer than its bytes"),
        ([], "BF16", "BF16 can only be in raw_input_contents"),
        ([], "FP128", "has the datatype 'FP128'"),
    ):
        request = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=raw)
        request.inputs.add(name="x", datatype=datatype).shape.append(1)
        check_raises(lambda request=request: stub.ModelInfer(request), sentence)
    assert client.infer("plain", [tensor("x", [1.0])]).as_numpy("output-0") == [2.0]


if __name__ == "__main__":
    run_checks(globals(), lambda addresses: InferenceServerClient(addresses["grpc_inference"]))
