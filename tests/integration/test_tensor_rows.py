"""Requests in tensors whose rows travel by themselves and come back as one answer."""

import numpy as np
import pytest
from grpc_client import connected, failure
from infer_client import CUT, arrays_in, infer, numbered

from marserve.frontend.grpc.messages import load_proto

pytestmark = pytest.mark.integration

MESSAGES = load_proto("open_inference.proto").messages
NEVER = 60_000
JSON = "application/json"
# Answers each row with its values doubled, the number of rows in the batch, and its id.
ROWS = """
import numpy as np

def handle(data, context):
    if data is None:
        return None
    return [answer(row["body"]["inputs"], len(data), context.get_request_id(place))
            for place, row in enumerate(data)]

def answer(inputs, count, id_):
    x = inputs[0]
    values = np.asarray(x["data"], "float32").reshape(x["shape"])
    return {
        "y": 2 * values,
        "count": np.full([1, 1], count),
        "id": np.array([[id_]], object),
        "shape": np.array([x["shape"]]),
    }
"""


@pytest.fixture(scope="module")
def server(share_server):
    with share_server(ts_open_inference_protocol="true") as shared:
        yield shared


@pytest.mark.parametrize("arrays", ["", "openInference: {arrays: true}\n"])
@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_a_request_is_cut_into_batches_and_put_together(server, install, size, arrays):
    name = install(CUT + arrays, handler=ROWS, batch_size=size, max_batch_delay=0)
    x = numbered(7)
    found = arrays_in(infer(server, name, x))
    np.testing.assert_array_equal(found["y"], 2 * x)
    full, rest = divmod(7, size)
    assert found["count"].ravel().tolist() == [size] * size * full + [rest] * rest
    ids = found["id"].ravel().tolist()
    assert [id_.rpartition(".")[2] for id_ in ids] == [str(row) for row in range(7)]
    assert found["shape"].tolist() == [[1, 2]] * 7


def test_rows_of_several_clients_share_a_batch_and_come_back_as_sent(server, install, together):
    name = install(CUT, handler=ROWS, initial_workers=2, batch_size=5, batch_policy="greedy")
    sent = [numbered(rows) + 1000 * number for number, rows in enumerate([3, 1, 7, 2, 9, 4, 1, 6])]
    answers = together([lambda x=x: infer(server, name, x) for x in sent])
    for x, answer in zip(sent, answers, strict=True):
        np.testing.assert_array_equal(arrays_in(answer)["y"], 2 * x)


def test_one_row_is_a_request_like_any_other(server, install):
    name = install(CUT, handler=ROWS)
    answer = infer(server, name, numbered(1))
    assert arrays_in(answer)["id"].tolist() == [[answer.headers["x-request-id"]]]


ALONG = """
import numpy as np

def handle(data, context):
    if data is None:
        return None
    found = []
    for row in data:
        a, b = (np.asarray(x["data"]).reshape(x["shape"]) for x in row["body"]["inputs"])
        assert a.shape == (3, 1, 2) and b.shape == (2, 1)
        found.append({"a": np.moveaxis(a, 1, 2).astype("float32"), "b": b.reshape(1, 2, 1) * 2})
    return found
"""


@pytest.mark.parametrize("arrays", ["", "openInference: {arrays: true}\n"])
def test_the_dimension_of_the_rows_is_the_models_choice(server, install, arrays):
    config = f"{CUT}batchDim: [1, 2]\n{arrays}"
    name = install(config, handler=ALONG, batch_size=3, max_batch_delay=0)
    a = np.arange(30, dtype="float32").reshape(3, 5, 2)
    b = np.arange(10).reshape(2, 5)
    found = arrays_in(infer(server, name, a, b))
    np.testing.assert_array_equal(found["a"], np.moveaxis(a, 1, 2))
    np.testing.assert_array_equal(found["b"], 2 * b.reshape(1, 2, 5))


def test_json_is_cut_and_answered_in_json(server, install):
    name = install(CUT, handler=ROWS, batch_size=2, max_batch_delay=0)
    for data in ([[1, 2], [3, 4], [5, 6.5]], [1, 2, 3, 4, 5, 6.5]):
        tensor = {"name": "x", "datatype": "FP32", "shape": [3, 2], "data": data}
        answer = server.inference(
            "POST", f"/v2/models/{name}/infer", json={"id": "7", "inputs": [tensor]}
        )
        assert answer.headers["content-type"] == JSON
        found = answer.json()
        assert (found["id"], found["model_name"]) == ("7", name)
        outputs = {output["name"]: output for output in found["outputs"]}
        y = {"name": "y", "datatype": "FP32", "shape": [3, 2], "data": [2, 4, 6, 8, 10, 13]}
        assert outputs["y"] == y
        assert outputs["count"]["data"] == [2, 2, 1]
        assert (outputs["id"]["datatype"], outputs["id"]["shape"]) == ("BYTES", [3, 1])


def test_only_the_outputs_asked_for_in_the_form_asked_for(server, install):
    name = install(CUT, handler=ROWS, batch_size=2, max_batch_delay=0)
    outputs = [{"name": "count"}, {"name": "y", "parameters": {"binary_data": False}}]
    found = arrays_in(infer(server, name, numbered(3), outputs=outputs))
    assert list(found) == ["count", "y"]
    assert found["y"].tolist() == (2 * numbered(3)).tolist()
    answer = infer(server, name, numbered(3), outputs=[{"name": "z"}])
    assert (answer.status_code, answer.json()["message"][:22]) == (400, "There is no output 'z'")


def test_large_json_is_read_in_pieces(server, install):
    name = install(f"{CUT}jobQueueSize: 2000\n", handler=ROWS, batch_size=500, max_batch_delay=0)
    x = numbered(2000, 40)
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.tolist()}
    answer = server.inference("POST", f"/v2/models/{name}/infer", json={"inputs": [tensor]})
    y = next(output for output in answer.json()["outputs"] if output["name"] == "y")
    np.testing.assert_array_equal(np.array(y["data"]).reshape(y["shape"]), 2 * x)


ELEMENTS = """
def handle(data, context):
    return data and [
        {"outputs": [{"name": "y", "datatype": "BYTES", "shape": x["shape"],
                      "data": [str(text) for text in x["data"]]}]}
        for row in data for x in row["body"]["inputs"]
    ]
"""


@pytest.mark.parametrize("dim", [0, 1])
def test_texts_are_cut_by_their_lengths(server, install, dim):
    name = install(f"{CUT}batchDim: {dim}\n", handler=ELEMENTS, batch_size=2, max_batch_delay=0)
    texts = ["", "a", "bb" * 300, "ccc", "\u20ac", "e" * 70_000]
    tensor = {"name": "x", "datatype": "BYTES", "shape": [3, 2], "data": texts}
    answer = server.inference("POST", f"/v2/models/{name}/infer", json={"inputs": [tensor]})
    (output,) = answer.json()["outputs"]
    assert (output["shape"], output["data"]) == ([3, 2], texts)


def request_of(name, x, **members):
    request = MESSAGES.ModelInferRequest(model_name=name, id="7", **members)
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    request.raw_input_contents.append(x.tobytes())
    return request


def test_over_grpc(server, install):
    name = install(CUT, handler=ROWS, batch_size=3, max_batch_delay=0)
    with connected(server) as client:
        x = numbered(7)
        response = client.method("open_inference", "ModelInfer")(request_of(name, x), timeout=20)
        assert (response.id, response.model_name) == ("7", name)
        assert response.outputs[0].shape == [7, 2]
        assert response.raw_output_contents[0] == (2 * x).tobytes()
        typed = MESSAGES.ModelInferRequest(model_name=name)
        typed.inputs.add(name="x", datatype="FP32", shape=x.shape)
        typed.inputs[0].contents.fp32_contents.extend(x.ravel().tolist())
        response = client.method("open_inference", "ModelInfer")(typed, timeout=20)
        assert response.outputs[0].contents.fp32_contents == (2 * x).ravel().tolist()
        requests = [request_of(name, numbered(rows)) for rows in (5, 1)]
        stream = client.method("open_inference", "ModelStreamInfer")(iter(requests), timeout=20)
        shapes = [answer.infer_response.outputs[0].shape for answer in stream]
        assert sorted(map(list, shapes)) == [[1, 2], [5, 2]]


def test_what_clients_are_told_of_it(server, install):
    declared = """
openInference:
  inputs: [{name: x, datatype: FP32, shape: [1, 16]}]
  outputs: [{name: y, datatype: FP32, shape: [1]}]
"""
    name = install(CUT + declared, handler=ROWS, batch_size=8)
    metadata = server.inference("GET", f"/v2/models/{name}").json()
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    assert metadata["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1]}]
    config = server.inference("GET", f"/v2/models/{name}/config").json()
    assert config["max_batch_size"] == 8
    assert [each["dims"] for each in (*config["input"], *config["output"])] == [[16], []]
    other = install(f"{CUT}batchDim: [1, 0]{declared}", handler=ROWS, batch_size=8)
    config = server.inference("GET", f"/v2/models/{other}/config").json()
    assert config["max_batch_size"] == 0
    assert [each["dims"] for each in (*config["input"], *config["output"])] == [[1, -1], [-1]]


# -- when it goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([numbered(3), numbered(4)], "as many rows along dimension 0; there are 'x0' 3, 'x1' 4."),
        ([numbered(0)], "have no rows"),
        ([np.float32(1)], "has the shape [], and no dimension 0"),
        ([numbered(3), np.float32(1)], "has the shape [], and no dimension 0"),
    ],
    ids=["differ", "none", "scalar", "beside a scalar"],
)
def test_what_cannot_be_cut_is_refused(server, install, record, inputs, sentence):
    handler = f"def handle(data, context):\n    open({str(record)!r}, 'a').write('seen')\n"
    name = install(CUT, handler=handler.replace("    open", "    return data and open"))
    answer = infer(server, name, *(np.asarray(each) for each in inputs))
    assert (answer.status_code, answer.json()["type"]) == (400, "BadRequestException")
    assert sentence in answer.json()["message"]
    assert record.read_text() == ""


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        ({"shape": [3, 2], "data": [1, 2, 3]}, "has 12 bytes; its shape [3, 2] wants 6 FP32"),
        ({"shape": [-2, 2], "data": [1]}, "inputs[0].shape must be a list of lengths"),
        ({"shape": [2**62, 2], "data": [1]}, "more elements than any message"),
        ({"shape": [2, 2], "data": [[1], [2, 3]]}, "lists of different lengths"),
        ({"shape": [2], "data": ["a", "b"]}, "a value that is no FP32"),
        ({"shape": [2]}, "has no data"),
        ({"shape": [2], "datatype": "FP128", "data": [1, 2]}, "has the datatype 'FP128'"),
        ({"shape": [2], "datatype": "BYTES", "data": ["a", 1]}, "an element that is not text"),
        ({"shape": [2], "datatype": "INT8", "data": [1, 1000]}, "a value that is no INT8"),
        ({"shape": [20_000, 2], "data": [[1, 2]] * 20_000 + [5]}, "x"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_json_that_lies_is_refused(server, install, tensor, sentence):
    name = install(CUT, handler=ROWS)
    tensor = {"name": "x", "datatype": "FP32", **tensor}
    answer = server.inference("POST", f"/v2/models/{name}/infer", json={"inputs": [tensor]})
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["message"]


def test_rows_beyond_the_limit_are_refused(server, install):
    name, x = install(CUT, handler=ROWS), numbered(1_000_000, 1)
    answer = infer(server, name, x)
    assert answer.status_code == 413
    assert "more than 100000 items" in answer.json()["message"]
    request = MESSAGES.ModelInferRequest(model_name=name, raw_input_contents=[x.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    with connected(server) as client:
        method = client.method("open_inference", "ModelInfer")
        code, text = failure(lambda: method(request, timeout=60))
    assert (code, "100000 items" in text) == ("INVALID_ARGUMENT", True)


WRONG = """
import numpy as np

def handle(data, context):
    return data and [answer(row["body"]["inputs"][0]["data"], context, place)
                     for place, row in enumerate(data)]

def answer(values, context, place):
    kind, number = values
    if kind == 1:
        return np.zeros([1, 1 + int(number) % 2])
    if kind == 2:
        return np.zeros([1], "int8" if number == 5 else "int16")
    if kind == 3:
        return {"a" if number else "b": np.zeros([1])}
    if kind == 4:
        return np.zeros([2, 3])
    if kind == 5:
        return np.float32(1)
    if kind == 6 and number == 5:
        context.set_response_status(422, "Bad", place)
        return "row five is bad"
    if kind == 7 and number == 5:
        raise ValueError
    return np.zeros([1])
"""


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize(
    ("kind", "status", "sentence"),
    [
        (1, 503, "output 'output-0'"),
        (2, 503, "output 'output-0'"),
        (3, 503, "outputs"),
        (4, 503, "its dimension 0 counts the rows"),
        (5, 503, "no dimension 0 for the batch"),
        (6, 422, "row five is bad"),
        (7, 503, "Prediction failed"),
    ],
)
def test_answers_that_make_no_whole_are_told(server, install, size, kind, status, sentence):
    name = install(CUT, handler=WRONG, batch_size=size, max_batch_delay=0)
    x = np.float32([[kind, number] for number in range(6)])
    answer = infer(server, name, x)
    assert (answer.status_code, sentence in answer.text) == (status, True), answer.text
    if kind == 6:
        assert answer.headers["x-failed-item"] == "5"
    assert infer(server, name, np.float32([[0, 0]] * 5)).status_code == 200
    with connected(server) as client:
        call = client.method("open_inference", "ModelInfer").future(request_of(name, x))
        _code, text = failure(call.result)
        assert sentence in text


def test_batch_mates_of_a_failing_request_are_answered(server, install, background, gate):
    handler = WRONG.replace("kind, number = values", "kind, number = values; wait(kind)")
    handler += f"\ndef wait(kind):\n    kind == 9 and open({gate.path!r}).read()\n"
    name = install(CUT, handler=handler, batch_size=16, max_batch_delay=0)
    ahead = background(infer, server, name, np.float32([[9, 0]]))
    gate.wait_entered()
    kinds = [0, 7, 0, 6, 4, 0]
    answers = []
    for number, kind in enumerate(kinds):
        x = np.float32([[kind, 4], [kind, 5]])
        answers.append(background(infer, server, name, x))
        server.wait_queued(name, 2 * number + 2)
    gate.open()
    assert ahead.result().status_code == 200
    found = [answer.result().status_code for answer in answers]
    assert found == [{7: 503, 6: 422, 4: 503}.get(kind, 200) for kind in kinds]


def test_too_few_results_fail_all_of_the_batch(server, install):
    handler = "def handle(data, context):\n    return data and [1]\n"
    name = install(f"{CUT}isolateFailures: false\n", handler=handler, batch_size=8)
    answer = infer(server, name, numbered(3))
    assert answer.status_code == 503
    assert answer.json()["message"] == "number of batch response mismatched"
