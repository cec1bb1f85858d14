"""tritonclient.http, as it is on PyPI, asks a server; see `conftest` for how it is run."""

import numpy as np
from checks import EVERY_DATATYPE, check_raises, run_checks
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput


def check_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert client.is_model_ready("echo", "1.0")
    assert not client.is_model_ready("nobody")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("plain-declared")
    assert metadata["versions"] == ["1.0"]
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    assert metadata["outputs"] == [{"name": "y", "datatype": "BYTES", "shape": [1]}]


def check_configuration_and_statistics(client):
    config = client.get_model_config("plain-declared")
    assert config["max_batch_size"] == 0
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 3]}]
    assert config["output"] == [{"name": "y", "data_type": "TYPE_STRING", "dims": [1]}]
    before = client.get_inference_statistics("label")["model_stats"][0]
    for _ in range(3):
        client.infer("label", [tensor("x", [1.0])])
    after = client.get_inference_statistics("label", "1.0")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 3
    success = after["inference_stats"]["success"]
    assert success["count"] == after["inference_count"]
    assert success["ns"] > 0
    assert after["last_inference"] > 1_700_000_000_000
    every = client.get_inference_statistics()["model_stats"]
    assert {"echo", "label"} <= {each["name"] for each in every}


def check_the_index(client):
    index = {each["name"]: each for each in client.get_model_repository_index()}
    assert index["echo"]["version"] == "1.0"
    assert index["echo"]["state"] == "READY"
    check_raises(lambda: client.load_model("echo"), "management address")
    check_raises(lambda: client.unload_model("echo"), "management address")


def check_compressed_requests(client):
    values = np.arange(300_000, dtype="float32")
    for algorithm in ("gzip", "deflate"):
        for name, is_binary in (("echo", True), ("echo-any", True), ("echo-any", False)):
            given = InferInput("x", list(values.shape), "FP32")
            given.set_data_from_numpy(values, binary_data=is_binary)
            answer = client.infer(name, [given], request_compression_algorithm=algorithm)
            np.testing.assert_array_equal(answer.as_numpy("x"), values)


def check_every_datatype(client):
    for datatype, values in EVERY_DATATYPE.items():
        given = tensor("x", values, datatype)
        wanted = InferRequestedOutput("x")
        answer = client.infer("echo", [given], request_id="7", outputs=[wanted])
        assert answer.get_response()["id"] == "7"
        assert answer.get_output("x")["datatype"] == datatype
        found = answer.as_numpy("x")
        assert found.shape == values.shape, datatype
        if datatype == "BF16":  # of which numpy does not know what is a number
            found, values = found.astype("float32"), values.astype("float32")
        np.testing.assert_array_equal(found, values, datatype)


def check_asynchronous(client):
    calls = [client.async_infer("plain", [tensor("x", [float(n)])]) for n in range(20)]
    assert [call.get_result().as_numpy("output-0").tolist() for call in calls] == [
        [2.0 * n] for n in range(20)
    ]


def check_arrays_and_plain_answers(client):
    answer = client.infer("arrays", [tensor("x", [1.0, 2.5])])
    assert answer.as_numpy("doubled").tolist() == [2.0, 5.0]
    assert answer.as_numpy("half").tolist() == [1.0, 2.5]
    assert answer.as_numpy("labels").tolist() == [b"1.0", b"2.5"]
    asked = [InferRequestedOutput("labels", binary_data=False), InferRequestedOutput("doubled")]
    answer = client.infer("arrays", [tensor("x", [1.0])], outputs=asked)
    assert [each["name"] for each in answer.get_response()["outputs"]] == ["labels", "doubled"]
    assert answer.get_output("labels")["data"] == ["1.0"]
    asked = [InferRequestedOutput("mine")]
    assert client.infer("plain", [tensor("x", [1.0])], outputs=asked).as_numpy("mine") == [2.0]
    answer = client.infer("label", [tensor("x", [1.0])])
    assert answer.as_numpy("output-0").tolist() == [b'{"tabby": 0.75, "tiger_cat": 0.25}']


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

    check_raises(ask("nobody"), "Model not found: nobody")
    check_raises(ask(model_version="9"), "Model version: 9 does not exist for model: echo")
    check_raises(ask("arrays", outputs=[InferRequestedOutput("z")]), "There is no output 'z'")
    check_raises(ask("plain", outputs=[InferRequestedOutput("y", class_count=2)]), "classification")
    for kind, sentence in {
        "raises": "Prediction failed",
        "refuses": "no cats in it",
        "shape": "output 'y' has 3 elements; its shape is [2, 2]",
        "datatype": "'FP128', which the protocol does not have",
        "range": "output 'y' has a value that is no INT8",
    }.items():
        given = [tensor("x", np.array([kind.encode()], object), "BYTES")]
        check_raises(lambda given=given: client.infer("wrong", given), sentence)
    lying = tensor("x", [1.0, 2.0])
    lying.set_shape([3])
    check_raises(lambda: client.infer("echo", [lying]), "its shape [3] wants 3 FP32")
    shared = InferInput("x", [1], "FP32")
    shared.set_shared_memory("region", 4)
    check_raises(
        lambda: client.infer("echo", [tensor("a", [1.0]), shared]), "Shared memory is not supported"
    )
    assert client.infer("plain", [tensor("x", [1.0])]).as_numpy("output-0") == [2.0]


def check_loading(client, management):
    with InferenceServerClient(management) as manager:
        manager.load_model("later")
        manager.load_model("later")  # is there already
        assert client.is_model_ready("later")
        manager.unload_model("later")
        assert not client.is_model_ready("later")
        check_raises(lambda: manager.load_model("nothing"), "not found in the model store: nothing")
        check_raises(lambda: manager.load_model("../x"), "")
        check_raises(lambda: manager.load_model("echo", config="{}"), "'config' is not supported")
        check_raises(lambda: manager.unload_model("nothing"), "Model not found: nothing")


def tensor(name, values, datatype="FP32"):
    if isinstance(values, list):
        values = np.array(values, "float32")
    given = InferInput(name, list(values.shape), datatype)
    given.set_data_from_numpy(values)
    return given


def check_json(client):
    given = InferInput("x", [2], "INT32")
    given.set_data_from_numpy(np.array([1, 2], "int32"), binary_data=False)
    asked = [InferRequestedOutput("y", binary_data=False)]
    answer = client.infer("plain-any", [given], request_id="7", outputs=asked)
    assert answer.as_numpy("y").tolist() == [2, 4]
    assert answer.get_response()["id"] == "7"
    assert answer.get_output("y")["datatype"] == "INT64"


if __name__ == "__main__":
    run_checks(globals(), lambda addresses: InferenceServerClient(addresses["inference"]))
