"""Handlers that get arrays of all rows of a batch (``stackInputs``)."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from infer_client import CUT, arrays_in, infer, numbered

pytestmark = pytest.mark.integration

STACK = f"{CUT}stackInputs: true\n"
JSON = "application/json"
# Answers each row with the double of what it is, and what the handler got.
DOUBLE = """
import numpy as np

def handle(data, context):
    if data is None:
        return None
    if not isinstance(data, dict):
        return ["described"]
    (x,) = data.values()
    count = np.full(len(x), len(x))
    kind = np.full(len(x), f"{type(x).__module__} {x.dtype} {','.join(data)}", object)
    return {"y": x * 2, "count": count, "kind": kind}
"""


@pytest.fixture(scope="module")
def server(share_server):
    with share_server(ts_open_inference_protocol="true") as shared:
        yield shared


def kinds_in(found):
    return set(found["kind"].ravel().tolist())


@pytest.mark.parametrize(
    ("library", "kind"), [("true", "numpy float32 x0"), ("torch", "torch torch.float32 x0")]
)
@pytest.mark.parametrize("size", [3, 8])
def test_a_batch_is_one_array(server, install, library, kind, size):
    name = install(f"{CUT}stackInputs: {library}\n", handler=DOUBLE, batch_size=size)
    x = numbered(7)
    found = arrays_in(infer(server, name, x))
    np.testing.assert_array_equal(found["y"], 2 * x)
    assert kinds_in(found) == {kind}
    full, rest = divmod(7, size)
    assert found["count"].tolist() == [size] * size * full + [rest] * rest
    assert arrays_in(infer(server, name, numbered(1)))["y"].tolist() == [[0, 2]]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_rows_of_all_shapes_come_back_as_sent(server, install, together, library):
    """Row mix-ups are impossible: requests of several clients, of different shapes and lengths."""
    config = f"{CUT}stackInputs: {library}\njobQueueSize: 500\n"
    name = install(config, handler=DOUBLE, initial_workers=2, batch_size=7, batch_policy="greedy")
    rows = st.integers(1, 12)
    requests = st.lists(st.tuples(rows, st.integers(1, 3), st.booleans()), min_size=1, max_size=12)

    @settings(
        max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(requests)
    def check(shapes):
        sent = []
        for number, (count, columns, is_whole) in enumerate(shapes):
            x = numbered(count, columns) + 1000 * number
            sent.append(x.astype("int64") if is_whole else x)
        answers = together([lambda x=x: infer(server, name, x) for x in sent])
        for x, answer in zip(sent, answers, strict=True):
            found = arrays_in(answer)["y"]
            assert found.dtype == x.dtype
            np.testing.assert_array_equal(found, 2 * x)

    check()


def test_along_another_dimension(server, install):
    handler = DOUBLE.replace("len(x)", "x.shape[1]")
    handler = handler.replace('"y": x * 2, "count": count, "kind": kind', '"y": x[0] * 2')
    name = install(f"{STACK}batchDim: [1, 0]\n", handler=handler, batch_size=3)
    x = np.arange(10, dtype="float32").reshape(1, 5, 2)
    np.testing.assert_array_equal(arrays_in(infer(server, name, x))["y"], 2 * x[0])


def test_every_datatype(server, install):
    name = install(STACK, handler=DOUBLE, batch_size=3)
    for dtype in ("<f4", "<f2", "<i8", "|u1"):
        x = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], dtype)
        np.testing.assert_array_equal(arrays_in(infer(server, name, x))["y"], 2 * x)
    elements = {"name": "x", "datatype": "BYTES", "shape": [4], "data": ["a", "b", "cc", ""]}
    answer = server.inference("POST", f"/v2/models/{name}/infer", json={"inputs": [elements]})
    assert answer.json()["outputs"][0]["data"] == ["aa", "bb", "cccc", ""]
    half = {"name": "x", "datatype": "BF16", "shape": [2], "data": [1.5, 2]}
    answer = server.inference("POST", f"/v2/models/{name}/infer", json={"inputs": [half]})
    assert answer.json()["outputs"][0] == {
        "name": "y", "datatype": "FP32", "shape": [2], "data": [3, 4]
    }  # fmt: skip
    torchs = install(f"{CUT}stackInputs: torch\n", handler=DOUBLE, batch_size=3)
    answer = server.inference("POST", f"/v2/models/{torchs}/infer", json={"inputs": [half]})
    assert answer.json()["outputs"][0]["datatype"] == "BF16"
    answer = server.inference("POST", f"/v2/models/{torchs}/infer", json={"inputs": [elements]})
    assert answer.status_code == 400
    assert "of which torch has no tensors" in answer.json()["message"]


# -- what is no tensor -----------------------------------------------------------------------------


def test_json_stacks_where_it_is_numbers(server, install):
    declared = "openInference: {inputs: [{name: x, datatype: FP32, shape: [1, 2]}]}\n"
    name = install(STACK + declared, handler=DOUBLE, batch_size=8)
    answer = server.predict(name, json=[[1, 2], [3, 4.5]])
    assert answer.json() == [
        {"y": [2, 4], "count": 2, "kind": "numpy float32 x"},
        {"y": [6, 9], "count": 2, "kind": "numpy float32 x"},
    ]
    answer = server.predict(name, json={"x": [1, 2]})
    assert answer.json() == {"y": [2, 4], "count": 1, "kind": "numpy float32 x"}
    answer = server.predict(name, json={"instances": [[1, 2]]})
    assert answer.json() == {"predictions": [{"y": [2, 4], "count": 1, "kind": "numpy float32 x"}]}
    plain = install(STACK, handler=DOUBLE, batch_size=8)
    assert server.predict(plain, json=[[1, 2]]).json()[0]["kind"] == "numpy int64 body"


@pytest.mark.parametrize(
    ("body", "kind", "sentence"),
    [
        (b"text", "text/plain", "is no number and no lists of numbers: 'text'"),
        (b"\x00\x01", "application/octet-stream", "is no number"),
        (b'{"x": [[1], [2, 3]]}', JSON, "cannot be an array"),
        (b'{"x": null}', JSON, "is no number"),
        (b"{}", JSON, "no numbers in the request"),
        (b'{"x": 1e999999999999999999}', JSON, "is no number"),
        (b'{"i": 1.5}', JSON, "has numbers that are no INT8"),
        (b'{"i": 300}', JSON, "has numbers that are no INT8"),
        (b"1" * 400, JSON, "is no number"),
        (b"[" * 70 + b"1" + b"]" * 70, "text/x", "is no number"),
        (b'{"x": ' + b"[" * 70 + b"1" + b"]" * 70 + b"}", JSON, "Input 'x'"),
        (b'{"x": ' + b"[" * 500 + b"]" * 500 + b"}", JSON, "Input 'x'"),
        (b"no tensors", "application/vnd.marserve.tensors", "no request with tensors"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_only_those_rows_are_refused_that_are_no_numbers(
    server, install, background, make_gate, body, kind, sentence
):
    gate = make_gate()
    handler = DOUBLE.replace(
        "    (x,) = data.values()",
        f"    (x,) = data.values()\n    x.shape == (1, 9) and open({gate.path!r}).read()",
    )
    declared = (
        "openInference: {inputs: [{name: i, datatype: INT8, shape: [1], optional: true}, "
        "{name: x, datatype: FP32, shape: [-1], optional: true}]}\n"
    )
    name = install(STACK + declared, handler=handler, batch_size=16, max_batch_delay=0)
    ahead = background(infer, server, name, numbered(1, 9))
    gate.wait_entered()
    good = [background(server.predict, name, json={"x": [1, 2]})]
    server.wait_queued(name, 1)
    headers = {"Content-Type": kind}
    bad = background(server.predict, name, data=body, headers=headers)
    server.wait_queued(name, 2)
    good.append(background(infer, server, name, numbered(3)))
    server.wait_queued(name, 5)
    gate.open()
    assert ahead.result().status_code == 200
    if "1e99" in str(body):  # infinite is a number
        assert bad.result().status_code == 200
    else:
        assert bad.result().status_code == 400, bad.result().text
        assert sentence in bad.result().json()["message"]
    assert good[0].result().json()["y"] == [2, 4]
    assert arrays_in(good[1].result())["y"].tolist() == [[0, 2], [4, 6], [8, 10]]


FACTOR = """
def handle(data, context):
    return data and {"y": data["x0"].sum(1) * data["x1"]}
"""
DECLARED = """
openInference:
  inputs:
    - {name: x0, datatype: FP32, shape: [-1, 2]}
    - {name: x1, datatype: INT64, shape: [1]}
  outputs: [{name: y, datatype: FP32, shape: [-1]}]
"""


@pytest.mark.parametrize("config", [STACK, "stackInputs: true\n"], ids=["rows", "whole"])
def test_inputs_that_the_model_declares_are_needed_as_declared(server, install, config):
    name = install(config + DECLARED, handler=FACTOR, batch_size=4, max_batch_delay=0)

    def refusal(answer):
        assert answer.status_code == 400, answer.text
        return answer.json()["message"]

    x, factor = np.array([[1, 2]], "float32"), np.array([3])
    assert arrays_in(infer(server, name, x, factor))["y"] == [9]
    assert "Input 'x1' is missing." in refusal(infer(server, name, x))
    wrong = refusal(infer(server, name, x[:, :1], factor))
    assert wrong == "Input 'x0' has the shape [1, 1]; the model takes [-1, 2]."
    wrong = refusal(infer(server, name, x, factor.astype("float32")))
    assert wrong == "Input 'x1' has the datatype 'FP32'; the model takes INT64."
    rows = {"x0": [1, 2], "x1": 3}
    assert server.predict(name, json=rows).json()["y"] == 9
    assert "Input 'x1' is missing." in refusal(server.predict(name, json={"x0": [1, 2]}))
    wrong = refusal(server.predict(name, json={**rows, "x0": [1]}))
    assert wrong == "Input 'x0' has the shape [1], not [2]."
    wrong = refusal(server.predict(name, json={**rows, "x1": 1.5}))
    assert "Input 'x1' has numbers that are no INT64" in wrong


def test_a_declaration_may_leave_out_the_dimension_of_rows(server, install):
    declared = DECLARED.replace("[-1, 2]", "[2]").replace("INT64, shape: [1]", "INT64, shape: []")
    name = install(STACK + declared, handler=FACTOR, batch_size=4, max_batch_delay=0)
    x, factors = np.array([[1, 2], [3, 4]], "float32"), np.array([3, 5])
    assert arrays_in(infer(server, name, x, factors))["y"].tolist() == [9, 35]
    assert server.predict(name, json={"x0": [1, 2], "x1": 3}).json()["y"] == 9
    assert server.predict(name, json={"x0": [1], "x1": 3}).status_code == 400


# -- answers ---------------------------------------------------------------------------------------

ANSWERS = """
import numpy as np

def handle(data, context):
    if data is None:
        return None
    x = data["x0"]
    return {answer}
"""


@pytest.mark.parametrize(
    ("answer", "outputs"),
    [
        ("x + 1", {"output-0": [[1, 2], [3, 4], [5, 6]]}),
        ("{'a': x[:, :1], 'b': x[:, 0]}", {"a": [[0], [2], [4]], "b": [0, 2, 4]}),
        ("[[row] for row in x[:, 0].tolist()]", {"output-0": [0, 2, 4]}),
        ("list(x[:, None])", {"output-0": [[0, 1], [2, 3], [4, 5]]}),
        ("x[:2]", "number of batch response mismatched"),
        ("{'a': x, 'b': x[:2]}", "Invalid model predict output"),
        ("{}", "Invalid model predict output"),
        ("{'a': 5}", "Invalid model predict output"),
        ("np.float32(5)", "Invalid model predict output"),
        ("None", "Invalid model predict output"),
        ("x.astype('complex64')", "an array of complex64, which the protocol does not have"),
        ("[1, 2]", "number of batch response mismatched"),
    ],
)
def test_what_a_handler_may_return(server, install, answer, outputs):
    handler = ANSWERS.replace("{answer}", answer)
    name = install(f"{STACK}isolateFailures: false\n", handler=handler, batch_size=8)
    found = infer(server, name, numbered(3))
    if isinstance(outputs, str):
        assert found.status_code == 503
        assert outputs in found.text
    else:
        arrays = {key: value.tolist() for key, value in arrays_in(found).items()}
        assert arrays == outputs


def test_a_status_of_one_row_speaks_for_its_request(server, install):
    handler = ANSWERS.replace("{answer}", "refuse(x, context)") + (
        "\ndef refuse(x, context):\n"
        "    for place in np.flatnonzero(x[:, 0] == 4):\n"
        "        context.set_response_status(422, 'Bad', int(place))\n"
        "    return x\n"
    )
    name = install(STACK, handler=handler, batch_size=8)
    answer = infer(server, name, numbered(4))
    assert (answer.status_code, answer.headers["x-failed-item"]) == (422, "2")
    assert infer(server, name, numbered(2)).status_code == 200


def test_padding_and_stages(server, install, tmp_path):
    name = install(f"{STACK}compiledBatchSizes: [4, 8]\n", handler=DOUBLE, batch_size=8)
    found = arrays_in(infer(server, name, numbered(3)))
    assert found["count"].tolist() == [4] * 3
    np.testing.assert_array_equal(found["y"], 2 * numbered(3))


NET = """
import torch

class Net(torch.nn.Module):
    def forward(self, x, y=None):
        return 2 * x if y is None else x + y
"""


@pytest.mark.parametrize("stages", ["", "overlapStages: true\n"])
def test_the_base_handler(server, tmp_path, make_archive, stages):
    model = tmp_path / "net.py"
    model.write_text(NET)
    torch.save({}, tmp_path / "net.pth")
    name = f"base{len(stages)}"
    archive = make_archive(
        server.store,
        "base_handler",
        name,
        f"{CUT}stackInputs: torch\n{stages}",
        model_file=str(model),
        serialized_file=str(tmp_path / "net.pth"),
    )
    answer = server.register(archive, initial_workers=1, batch_size=4, model_name=name)
    assert answer.status_code == 200, answer.text
    x = numbered(7)
    np.testing.assert_array_equal(arrays_in(infer(server, name, x))["output-0"], 2 * x)
    both = server.predict(name, json=[{"x": [1.5], "y": [2.5]}, [1.5], {"x": [1.5], "y": [5.5]}])
    assert both.json() == [[4.0], [3.0], [7.0]]


@pytest.mark.parametrize("mode", ["asyncCommunication", "continuousBatching"])
def test_it_is_refused_where_no_batches_are_formed(server, make_archive, mode):
    archive = make_archive(server.store, DOUBLE, "m", f"stackInputs: true\n{mode}: true\n")
    answer = server.register(archive)
    assert answer.status_code == 400
    assert f"stackInputs has no meaning beside {mode}" in answer.json()["message"]


def test_requests_that_are_not_cut_need_one_row(server, install):
    name = install("stackInputs: true\n", handler=DOUBLE)
    assert infer(server, name, numbered(1)).status_code == 200
    answer = infer(server, name, numbered(2))
    assert answer.status_code == 400
    assert "dynamicBatchSize" in answer.json()["message"]


def test_the_keys_may_be_in_snake_case(server, install):
    config = "dynamic_batch_size: true\nbatch_dim: 1\nstack_inputs: torch\n"
    name = install(config, handler=DOUBLE.replace("len(x), ", "[1, x.shape[1]], "), batch_size=8)
    x = numbered(3).T
    found = arrays_in(infer(server, name, x))
    np.testing.assert_array_equal(found["y"], 2 * x)
    assert kinds_in(found) == {"torch torch.float32 x0"}


def test_another_library_is_refused_and_the_accepted_ones_are_named(server, make_archive):
    archive = make_archive(server.store, DOUBLE, "frames", "stackInputs: pandas\n")
    answer = server.register(archive)
    assert answer.status_code == 400
    assert "stackInputs" in answer.json()["message"]
    assert "true, false, numpy or torch" in answer.json()["message"]
