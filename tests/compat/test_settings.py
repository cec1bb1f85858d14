"""Settings that change answers: Open Inference Protocol, envelopes, CORS, inputs left undecoded."""

import json

import pytest

pytestmark = pytest.mark.integration

JSON = "application/json"
CORS = {
    "access-control-allow-origin": "http://a.example",
    "access-control-allow-methods": "GET, POST",
    "access-control-allow-headers": "X-One",
}


@pytest.fixture(scope="module")
def server(start_compat_server):
    properties = {
        "ts_open_inference_protocol": "true",
        "service_envelope": "kservev2",
        "decode_input_request": "false",
        "cors_allowed_origin": "http://a.example",
        "cors_allowed_methods": "GET, POST",
        "cors_allowed_headers": "X-One",
    }
    with start_compat_server(**properties) as server:
        assert server.register("increase.mar", initial_workers=1).status_code == 200
        yield server


@pytest.fixture
def ask(ask_of, server):
    return ask_of(server)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v2", {"name": "Torchserve", "extenstion": ["kserve", "kubeflow"]}),
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
    ],
)
def test_the_protocols_own_paths(ask, path, found):
    answer = ask(f"GET {path}")
    assert answer.status == 200
    document = json.loads(answer.body)
    assert {name: document[name] for name in found} == found


def kserve_input(data, kind, shape, name="i"):
    return {"name": name, "shape": shape, "datatype": kind, "data": data}


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (
            [kserve_input([1, 2], "INT64", [2])],
            [{"name": "i", "datatype": "INT64", "data": [2, 3], "shape": [2]}],
        ),
        (
            [kserve_input([1.5, 2], "FP32", [2])],
            [{"name": "i", "datatype": "FP64", "data": [2.5, 3.0], "shape": [2]}],
        ),
        (
            [kserve_input([1], "INT64", [1]), kserve_input([5], "INT32", [1], "j")],
            [
                {"name": "i", "datatype": "INT64", "data": [2], "shape": [1]},
                {"name": "j", "datatype": "INT64", "data": [6], "shape": [1]},
            ],
        ),
    ],
)
def test_tensors_in_and_out(ask, inputs, outputs):
    body = json.dumps({"id": "mine", "inputs": inputs})
    answer = ask("POST /v2/models/increase/infer", body, JSON)
    assert answer.status == 200, answer.body
    assert json.loads(answer.body) == {
        "id": "mine",
        "model_name": "increase",
        "model_version": "1.0",
        "outputs": outputs,
    }


@pytest.mark.parametrize(
    ("line", "to", "status"),
    [
        ("GET /ping", "inference", 200),
        ("POST /predictions/nobody", "inference", 404),
        ("OPTIONS /predictions/increase", "inference", 200),
        ("GET /models", "management", 200),
        ("GET /metrics", "metrics", 200),
    ],
)
def test_every_answer_has_the_cors_headers(ask, line, to, status):
    answer = ask(line, to=to)
    assert answer.status == status
    assert {name: answer.header(name) for name in CORS} == CORS
