"""NaN and infinite numbers in answers in JSON, by ``json_nan``."""

import json

import numpy as np
import pytest
from infer_client import CUT, arrays_in, infer, numbered

pytestmark = pytest.mark.integration

ODD = """
import numpy as np

def handle(data, context):
    if data is None:
        return None
    odd = {
        "score": float("nan"), "most": [float("inf"), -float("inf"), 1.5],
        "array": np.array([1.0, np.nan], "float32"), "deep": {"tuple": (1, float("nan"))},
    }
    return [{"score": 1.0} if row.get("body") == "even" else odd for row in data]
"""
TENSORS = """
import numpy as np

def handle(data, context):
    if data is None:
        return None
    return [{"y": np.array([[np.nan, np.inf, -np.inf, 1.5]], "float32")} for _ in data]
"""
KEPT = [float("nan"), float("inf"), -float("inf"), 1.5]


def strict(answer):
    """Read JSON as clients of other languages do."""

    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(answer.content, parse_constant=refuse)


@pytest.fixture(scope="module", params=["", "null", "refuse"])
def server(request, share_server):
    properties = {"json_nan": request.param} if request.param else {}
    with share_server(ts_open_inference_protocol="true", **properties) as shared:
        shared.json_nan = request.param
        yield shared


def assert_refused(answer, what):
    assert answer.status_code == 500, answer.text
    message = strict(answer)["message"]
    assert what in message
    assert "json_nan=refuse" in message


def test_a_prediction(server, install):
    name = install(handler=ODD)
    assert strict(server.predict(name, json="even")) == {"score": 1.0}
    answer = server.predict(name, json="odd")
    if server.json_nan == "refuse":
        assert_refused(answer, 'prediction["score"] is NaN')
    elif server.json_nan == "null":
        assert strict(answer) == {
            "score": None,
            "most": [None, None, 1.5],
            "array": [1.0, None],
            "deep": {"tuple": [1, None]},
        }
        assert answer.text == json.dumps(answer.json(), indent=2)
    else:
        for text in ('"score": NaN', "Infinity,", "-Infinity,"):
            assert text in answer.text


def test_items_of_a_list(server, install):
    name = install(CUT, handler=ODD, batch_size=4, max_batch_delay=0)
    answer = server.predict(name, json=["even", "odd", "even"])
    if server.json_nan == "refuse":
        assert_refused(answer, 'prediction["score"] is NaN')
        assert answer.headers["x-failed-item"] == "1"
    elif server.json_nan == "null":
        assert [row["score"] for row in strict(answer)] == [1.0, None, 1.0]
    else:
        assert '"score": NaN' in answer.text


def test_text_of_a_handler_is_not_json_in_a_list(server, install):
    source = "def handle(data, context):\n    return data and ['{\"a\": NaN}' for _ in data]\n"
    name = install(CUT, handler=source)
    assert server.predict(name, json="x").text == '{"a": NaN}'
    answer = server.predict(name, json=["x"])
    if server.json_nan:
        assert strict(answer) == ['{"a": NaN}']
    else:
        assert '"a": NaN' in answer.text


@pytest.mark.parametrize("config", ["openInference: {arrays: true}\n", CUT], ids=["whole", "rows"])
def test_tensors(server, install, config):
    name = install(config, handler=TENSORS, batch_size=4, max_batch_delay=0)
    data = {"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}
    path = f"/v2/models/{name}/infer"
    answer = server.inference("POST", path, json={"inputs": [data]})
    if server.json_nan == "refuse":
        assert_refused(answer, "output 'y' has a number that is not finite")
    else:
        found = answer.json()["outputs"][0]["data"][:4]
        if server.json_nan == "null":
            assert strict(answer)["outputs"][0]["data"][:4] == [None, None, None, 1.5] == found
        else:
            np.testing.assert_array_equal(found, KEPT)
    # As bytes they are numbers like all others.
    np.testing.assert_array_equal(arrays_in(infer(server, name, numbered(2)))["y"][0], KEPT)


@pytest.mark.parametrize("envelope", ["json", "kserve"])
@pytest.mark.parametrize("json_nan", ["null", "refuse"])
def test_an_envelope(start_server, envelope, json_nan):
    source = (
        "def handle(rows, context):\n"
        "    return rows and [float('nan') if row == 'odd' else 1.0 for row in rows]\n"
    )
    with start_server(service_envelope=envelope, json_nan=json_nan) as server:
        server.install(source, "m")
        even = server.predict("m", json={"instances": ["even"]})
        assert strict(even) == {"predictions": [1.0]}
        answer = server.predict("m", json={"instances": ["even", "odd"]})
        if json_nan == "null":
            assert strict(answer) == {"predictions": [1.0, None]}
        else:
            assert_refused(answer, "is NaN")


def test_other_words_are_refused(prepare_server):
    with prepare_server(json_nan="string") as server:
        process = server.launch()
        assert process.wait(20) != 0
        server.wait_printed("json_nan")
