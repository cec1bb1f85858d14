import base64
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from marserve.backend.tensors import datatypes
from marserve.backend.tensors.requests import document_of
from marserve.backend.tensors.wire import ENCODING, SIZE, UNREADABLE


def body_of(*inputs: tuple[str, list[int], bytes, dict[str, Any]]) -> bytearray:
    described = [
        {"name": "x", "datatype": kind, "shape": shape, "parameters": {SIZE: len(raw), **more}}
        for kind, shape, raw, more in inputs
    ]
    head = json.dumps({"id": "7", "inputs": described}).encode() + b"\n"
    return bytearray(head + b"".join(raw for _, _, raw, _ in inputs))


def test_the_handler_finds_the_document_that_a_client_could_have_sent():
    texts = datatypes.write_elements([b"tabby", b"\xff"])
    numbers = datatypes.write_numbers("INT16", [1, -2])
    document = document_of(body_of(("INT16", [2, 1], numbers, {}), ("BYTES", [2], texts, {"a": 1})))
    assert document == {
        "id": "7",
        "inputs": [
            {"name": "x", "datatype": "INT16", "shape": [2, 1], "data": [1, -2]},
            {
                "name": "x",
                "datatype": "BYTES",
                "shape": [2],
                "parameters": {"a": 1},
                "data": ["tabby", b"\xff"],
            },
        ],
    }


def test_elements_can_be_had_as_torchserve_gives_them():
    texts = datatypes.write_elements([b"tabby"])
    document = document_of(body_of(("BYTES", [1], texts, {ENCODING: "base64"})))
    assert document["inputs"][0]["data"] == [base64.b64encode(b"tabby").decode()]


@pytest.mark.parametrize(
    "body",
    [b"", b"\n", b"[]\n", b"{}\n", b'{"inputs": 5}\n', b'{"inputs": [5]}\n', b"no JSON\n"]
    + [
        json.dumps({"arrays": arrays, "inputs": [{"parameters": {SIZE: size}, **more}]}).encode()
        + b"\n123"
        for arrays in (False, True)
        for size, more in (
            ("x", {}),
            (4, {}),
            (3, {"datatype": "FP32", "shape": [1]}),
            (3, {"datatype": "FP128", "shape": [1]}),
            (3, {"datatype": "UINT8", "shape": [5]} if arrays else {"datatype": 5}),
            (3, {"datatype": "BYTES", "shape": [1]}),
            (3, {"datatype": "UINT8", "shape": "x"} if arrays else {"datatype": []}),
        )
    ],
)
def test_a_clients_own_body_of_that_type_is_no_more_than_wrong(body):
    with pytest.raises(UNREADABLE):
        document_of(body)


def test_arrays_have_the_shape_and_the_datatype():
    for datatype, dtype in {**datatypes.NUMPY, "BF16": "<f4"}.items():
        raw = datatypes.write_numbers(datatype, [1, 0])
        head = {"name": "x", "datatype": datatype, "shape": [2, 1], "parameters": {SIZE: len(raw)}}
        body = json.dumps({"arrays": True, "inputs": [head]}).encode() + b"\n" + raw
        values = document_of(bytearray(body))["inputs"][0]["data"]
        assert (values.dtype, values.tolist()) == (np.dtype(dtype), [[1], [0]])
        assert document_of(body, as_lists=True)["inputs"][0]["data"] == [1, 0]
    texts = datatypes.write_elements([b"a", b"\xff"])
    head = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "parameters": {SIZE: len(texts)}}
    body = json.dumps({"arrays": True, "inputs": [head]}).encode() + b"\n" + texts
    assert document_of(body)["inputs"][0]["data"].tolist() == [[b"a", b"\xff"]]


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # importing it fails
import json
import subprocess
import sys
from marserve.backend.tensors.answers import AnswerFormat
from marserve.backend.tensors.requests import document_of
from marserve.backend.tensors.stacking import Stacking
from marserve.backend.tensors.wire import SIZE, WantedOutputs, pack_request

head = {"inputs": [{"name": "x", "datatype": "INT16", "shape": [2], "parameters": {SIZE: 4}}]}
document = document_of(b"".join(pack_request(head, [b"\\1\\0\\2\\0"])))
form = AnswerFormat({"id": "7"}, WantedOutputs({"y": True}))
body, end = form.encode({"outputs": [{**document["inputs"][0], "name": "y"}]})
try:
    Stacking("numpy", 0, [])
except ImportError:
    print(json.loads(body[:end])["outputs"][0]["shape"], body[end:])
"""


def test_without_numpy_tensors_are_lists():
    command = [sys.executable, "-c", WITHOUT_NUMPY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[2] b'\\x01\\x00\\x02\\x00'\n", "")
