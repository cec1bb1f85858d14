"""What the clients of KServe's protocols send and expect, byte for byte, to real workers."""

import json
import struct

import pytest

pytestmark = pytest.mark.integration

HEADER = "Inference-Header-Content-Length"

ECHO = """
def handle(data, context):
    return data and [row["data"] for row in data]
"""
FAIL = """
def handle(data, context):
    return data and 1 / 0
"""


@pytest.fixture(scope="module")
def server(start_server):
    with start_server(service_envelope="kservev2", ts_open_inference_protocol="true") as shared:
        shared.install(ECHO, "echo", batch_size=4, max_batch_delay=60_000)
        shared.install(ECHO, "one")
        shared.install(FAIL, "fail")
        yield shared


def tensors(*numbers, size=None):
    """A request as tritonclient sends it: numbers, then a text, behind the JSON."""
    buffer = struct.pack(f"<{len(numbers)}f", *numbers)
    text = struct.pack("<I", 5) + b"tabby"
    inputs = [
        ("x", "FP32", [len(numbers)], len(buffer) if size is None else size),
        ("name", "BYTES", [1], len(text)),
    ]
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "datatype": datatype,
                    "shape": shape,
                    "parameters": {"binary_data_size": length},
                }
                for name, datatype, shape, length in inputs
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return {"data": head + buffer + text, "headers": {HEADER: str(len(head))}}


def numbers_in(answer):
    """The numbers in an answer to `tensors`."""
    end = int(answer.headers[HEADER])
    numbers, text = json.loads(answer.content[:end])["outputs"]
    middle = end + numbers["parameters"]["binary_data_size"]
    assert (numbers["datatype"], text["datatype"]) == ("FP64", "BYTES")
    assert answer.content[middle:] == struct.pack("<I", 5) + b"tabby"
    return list(struct.unpack(f"<{numbers['shape'][0]}d", answer.content[end:middle]))


def test_inputs_that_the_model_declares_are_needed_as_declared(server):
    server.install(
        ECHO,
        "declared",
        "openInference: {inputs: [{name: x, datatype: FP32, shape: [-1]}, "
        "{name: name, datatype: BYTES, shape: [1]}]}\n",
    )
    numbers = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}
    text = {"name": "name", "datatype": "BYTES", "shape": [1], "data": ["tabby"]}

    def ask(*inputs):
        return server.inference("POST", "/v2/models/declared/infer", json={"inputs": inputs})

    assert ask(numbers, text).json()["outputs"][0]["data"] == [1, 2]
    assert ask({**numbers, "shape": [-1]}, {**text, "shape": [-1]}).status_code == 200
    for inputs, why in [
        ([numbers], "Input 'name' is missing."),
        ([{**numbers, "datatype": "INT8"}, text], "has the datatype 'INT8'; the model takes FP32."),
        ([{**numbers, "shape": [1, 1, 2]}, text], "has the shape [1, 1, 2]; the model takes [-1]."),
    ]:
        answer = ask(*inputs)
        assert (answer.status_code, why in answer.json()["error"]) == (400, True), answer.text
    answer = server.inference("POST", "/v2/models/declared/infer", **tensors(1, 2))
    assert numbers_in(answer) == [1, 2]


def test_a_batch_of_tensors_behind_their_json(server, together):
    requests = [tensors(1, 2), tensors(3, size=7), tensors(4), tensors()]
    calls = [
        lambda request=request: server.inference("POST", "/v2/models/echo/infer", **request)
        for request in requests
    ]
    good, bad, other, empty = together(calls)
    assert [numbers_in(value) for value in (good, other, empty)] == [[1.0, 2.0], [4.0], []]
    assert bad.status_code == 400
    assert bad.headers["content-type"] == "application/json"
    assert bad.json()["error"] == bad.json()["message"]


def test_the_same_tensors_in_json(server):
    tensor = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1.0, 2.0]}
    answer = server.inference("POST", "/v2/models/one/infer", json={"inputs": [tensor]})
    assert HEADER not in answer.headers
    assert answer.json()["outputs"] == [
        {"name": "x", "datatype": "FP64", "data": [1.0, 2.0], "shape": [2]}
    ]


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/v2/models/nobody/infer", 404, "Model not found: nobody"),
        ("/v2/models/fail/infer", 503, "Prediction failed"),
        ("/v2/repository/nothing", 404, "Requested resource is not found"),
    ],
)
def test_errors_in_the_word_that_clients_read(server, path, status, sentence):
    answer = server.inference("POST", path, **tensors(1))
    assert answer.status_code == answer.json()["code"] == status
    assert sentence in answer.json()["error"]


def test_a_client_without_a_key_can_read_why(start_server):
    with start_server(
        ts_open_inference_protocol="true", disable_token_authorization="false"
    ) as closed:
        answer = closed.inference("POST", "/v2/models/m/infer", **tensors(1))
        assert answer.status_code == 400
        assert "token" in answer.json()["error"].lower()


def test_instances_of_the_first_protocol(start_server, together):
    with start_server(service_envelope="kserve") as server:
        server.install(
            "def handle(data, context): return data and [2 * one for one in data]",
            "double",
            batch_size=3,
            max_batch_delay=60_000,
        )
        documents = [{"instances": [1, 2]}, {"nothing": []}, {"instances": [3]}]
        first, bad, second = together(
            [
                lambda document=document: server.inference(
                    "POST", "/v1/models/double:predict", json=document
                )
                for document in documents
            ]
        )
    assert [first.json(), second.json()] == [{"predictions": [2, 4]}, {"predictions": [6]}]
    why = 'The body must be a JSON object with a list: {"instances": [...]}.'
    assert (bad.status_code, bad.json()["message"]) == (400, why)


MALFORMED = {
    "nothing": b"",
    "text": b"kitten",
    "cut": b'{"instances": [1',
    "no text": b'\xff\xfe{"instances": [1]}',
    "null": b"null",
    "list": b"[[1], [2]]",
    "deep": b'{"instances": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "endless number": b'{"instances": [' + b"9" * 5000 + b"]}",
    "nothing in it": b"{}",
    "no list": b'{"instances": 5, "inputs": 5}',
    "no tensors": b'{"instances": "abc", "inputs": [null]}',
    "another shape": b'{"inputs": [{"name": "x", "shape": [3], "datatype": "FP32", "data": [1]}]}',
    "lists of nothing": b'{"inputs": [{"name": "x", "shape": [1000000000, 0], "datatype": "FP32", '
    b'"data": []}]}',
}
GOOD = {
    "json": {"instances": [1]},
    "kserve": {"instances": [1]},
    "kservev2": {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]},
}
PATHS = ("/predictions/m", "/v1/models/m:predict", "/v2/models/m/infer")


@pytest.mark.parametrize("envelope", GOOD)
def test_malformed_bodies_in_an_envelope_were_the_servers_fault(start_server, envelope, together):
    with start_server(service_envelope=envelope) as server:
        server.install("def handle(d, c): return d and [1] * len(d)", "m")
        batched = {"batch_size": 4, "max_batch_delay": 60_000}
        server.install("def handle(d, c): return d and [1] * len(d)", "mates", **batched)
        for body in MALFORMED.values():
            for path in PATHS:
                for kind in ("application/json", "application/octet-stream", "text/plain"):
                    headers = {"content-type": kind}
                    answer = server.inference("POST", path, data=body, headers=headers)
                    assert answer.status_code == 400, (body[:80], path, kind)
                    assert answer.json()["type"] == "BadRequestException"
                    assert answer.json()["message"] != "Prediction failed"
            mates = [{"json": GOOD[envelope]}, {"data": body}, *[{"json": GOOD[envelope]}] * 2]
            answers = together(
                [lambda mate=mate: server.predict("mates", **mate) for mate in mates]
            )
            assert [answer.status_code for answer in answers] == [200, 400, 200, 200]
