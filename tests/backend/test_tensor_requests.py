import base64
import json
from typing import Any

import numpy as np
import pytest
import torch

from marserve.backend import tensors
from marserve.backend.protocol import Input
from marserve.backend.tensor_requests import (
    ENCODING,
    FORMAT_HEADER,
    IN_BODY,
    SIZE,
    AnswerFormat,
    UnknownOutput,
    document_of,
)
from marserve.backend.tensor_results import outputs_of
from marserve.backend.tensors import UnusableTensor


def body_of(*inputs: tuple[str, list[int], bytes, dict[str, Any]]) -> bytearray:
    described = [
        {"name": "x", "datatype": kind, "shape": shape, "parameters": {SIZE: len(raw), **more}}
        for kind, shape, raw, more in inputs
    ]
    head = json.dumps({"id": "7", "inputs": described}).encode() + b"\n"
    return bytearray(head + b"".join(raw for _, _, raw, _ in inputs))


def test_the_handler_finds_the_document_that_a_client_could_have_sent() -> None:
    texts = tensors.write_elements([b"tabby", b"\xff"])
    numbers = tensors.write_numbers("INT16", [1, -2])
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


def test_elements_can_be_had_as_torchserve_gives_them() -> None:
    texts = tensors.write_elements([b"tabby"])
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
def test_a_clients_own_body_of_that_type_is_no_more_than_wrong(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        document_of(body)


def test_arrays_have_the_shape_and_the_datatype() -> None:
    for datatype, dtype in {**tensors.NUMPY, "BF16": "<f4"}.items():
        raw = tensors.write_numbers(datatype, [1, 0])
        head = {"name": "x", "datatype": datatype, "shape": [2, 1], "parameters": {SIZE: len(raw)}}
        body = json.dumps({"arrays": True, "inputs": [head]}).encode() + b"\n" + raw
        values = document_of(bytearray(body))["inputs"][0]["data"]
        assert (values.dtype, values.tolist()) == (np.dtype(dtype), [[1], [0]])
        assert document_of(body, as_lists=True)["inputs"][0]["data"] == [1, 0]
    texts = tensors.write_elements([b"a", b"\xff"])
    head = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "parameters": {SIZE: len(texts)}}
    body = json.dumps({"arrays": True, "inputs": [head]}).encode() + b"\n" + texts
    assert document_of(body)["inputs"][0]["data"].tolist() == [[b"a", b"\xff"]]


def described(result: Any, name: str = "") -> list[tuple[str, str, list[int], Any]]:
    return [
        (
            output.name,
            output.datatype,
            output.shape,
            list(tensors.read_elements(output.buffer))
            if output.datatype == "BYTES"
            else tensors.read_numbers(output.datatype, output.buffer),
        )
        for output in outputs_of(result, name)[1]
    ]


DOCUMENT = {"outputs": [{"name": "y", "datatype": "FP16", "shape": [2, 1], "data": [[1], [2.5]]}]}


@pytest.mark.parametrize(
    ("result", "outputs"),
    [
        (DOCUMENT, [("y", "FP16", [2, 1], [1.0, 2.5])]),
        (json.dumps(DOCUMENT), [("y", "FP16", [2, 1], [1.0, 2.5])]),
        (json.dumps(DOCUMENT).encode(), [("y", "FP16", [2, 1], [1.0, 2.5])]),
        ({"outputs": [{"data": [1, 2]}]}, [("output-0", "INT64", [2], [1, 2])]),
        ({"outputs": [{"data": np.ones(2), "datatype": "INT8"}]}, None),
        ({"outputs": [{"data": np.ones(2, "i4"), "datatype": "INT8"}]},
         [("output-0", "INT8", [2], [1, 1])]),
        ({"a": np.float32([1]), "b": torch.tensor([[True]])},
         [("a", "FP32", [1], [1.0]), ("b", "BOOL", [1, 1], [True])]),
        (torch.tensor([1.5], dtype=torch.bfloat16), [("output-0", "BF16", [1], [1.5])]),
        (np.array([b"a", "b"], object), [("output-0", "BYTES", [2], [b"a", b"b"])]),
        (np.array([1, 2], ">i2"), [("output-0", "INT16", [2], [1, 2])]),
        (5, [("output-0", "INT64", [1], [5])]),
        ([1, 2.5], [("output-0", "FP64", [2], [1.0, 2.5])]),
        ([[True], [False]], [("output-0", "BOOL", [2, 1], [True, False])]),
        ("tabby", [("output-0", "BYTES", [1], [b"tabby"])]),
        (b"\xff", [("output-0", "BYTES", [1], [b"\xff"])]),
        ({"tabby": 0.5}, [("output-0", "BYTES", [1], [b'{"tabby": 0.5}'])]),
        ([[1], [2, 3]], [("output-0", "BYTES", [1], [b"[[1], [2, 3]]"])]),
        ([], [("output-0", "BYTES", [1], [b"[]"])]),
        ([np.float32(1.5), torch.tensor(2.0)], [("output-0", "FP64", [2], [1.5, 2.0])]),
        ({"a": np.ones(1), "b": 2}, [("output-0", "BYTES", [1], [b'{"a": [1.0], "b": 2}'])]),
        (None, [("output-0", "BYTES", [1], [b"null"])]),
        ("{no document}", [("output-0", "BYTES", [1], [b"{no document}"])]),
    ],
    ids=repr,
)  # fmt: skip
def test_whatever_a_handler_returns_becomes_outputs(result: Any, outputs: Any) -> None:
    if outputs is None:
        with pytest.raises(UnusableTensor, match="no INT8"):
            described(result)
    else:
        assert described(result) == outputs


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ({"shape": [2, 2], "data": [1, 2, 3]}, "'y' has 3 elements; its shape is [2, 2]"),
        ({"shape": [-1], "data": [1]}, "length -1"),
        ({"datatype": "FP128", "data": [1]}, "'FP128', which the protocol does not have"),
        ({"datatype": "UINT8", "data": [-1]}, "no UINT8"),
        ({"datatype": "FP32", "data": [[1], [2, 3]]}, "different lengths"),
        ({"data": np.array([1j])}, "complex128"),
        pytest.param({"data": object()}, "cannot be sent", id="object"),
        ({"shape": "2", "datatype": "INT8", "data": [1, 2, 3]}, "its shape is [2]"),
        ({"shape": [None], "data": [1]}, "shape"),
    ],
    ids=repr,
)
def test_outputs_that_cannot_be_sent_say_why(output: Any, sentence: str) -> None:
    with pytest.raises(UnusableTensor) as caught:
        outputs_of({"outputs": [{"name": "y", **output}]}, "")
    assert sentence in str(caught.value)


TOLD = {"id": "7", "model_name": "m", "model_version": "1"}


def form_of(head: Any) -> AnswerFormat | None:
    text = json.dumps({**TOLD, **head} if isinstance(head, dict) else head)
    return AnswerFormat.of(Input("1", {FORMAT_HEADER: text}, []), {})


def test_the_answer_has_what_was_asked_for() -> None:
    asked = [{"name": "b"}, {"name": "a", "parameters": {"binary_data": False}}]
    form = form_of({"id": "7", "parameters": {"binary_data_output": True}, "outputs": asked})
    assert form is not None
    body, end = form.encode({name: np.int32([1]) for name in "abc"})
    assert body[:end].count(b"\n") == 1
    assert json.loads(body[:end]) == {
        **TOLD,
        "outputs": [
            {"name": "b", "datatype": "INT32", "shape": [1], "parameters": {SIZE: 4}},
            {"name": "a", "datatype": "INT32", "shape": [1], "data": [1]},
        ],
    }
    assert body[end:] == b"\1\0\0\0"
    with pytest.raises(UnknownOutput, match="no output 'b'; the handler gave c"):
        form.encode({"c": np.int32([1])})


def test_an_output_without_a_name_has_the_one_asked_for() -> None:
    form = form_of({"outputs": [{"name": "mine"}]})
    assert form is not None
    assert json.loads(form.encode([1])[0])["outputs"][0]["name"] == "mine"


def test_the_handlers_own_members_are_kept() -> None:
    form = form_of({"id": "7"})
    assert form is not None
    result = {**DOCUMENT, "id": "8", "model_name": "x", "parameters": {"a": 1}}
    answer = json.loads(form.encode(result)[0])
    del answer["outputs"]
    assert answer == {**TOLD, "id": "8", "model_name": "x", "parameters": {"a": 1}}


def test_bytes_go_into_json_only_as_text() -> None:
    form = form_of({})
    assert form is not None
    with pytest.raises(UnusableTensor, match="ask for it as binary data"):
        form.encode(b"\xff")


@pytest.mark.parametrize("text", ["", "[1]", "{}", "5", "[" * 9999, json.dumps({"id": "7"})])
def test_a_clients_own_header_of_that_name_costs_nobody_an_answer(text: str) -> None:
    assert AnswerFormat.of(Input("1", {FORMAT_HEADER: text}, []), {}) is None


@pytest.mark.parametrize("head", [{"outputs": 5}, {"outputs": [{}]}, {"outputs": ["a"]}])
def test_outputs_that_are_none_ask_for_all(head: Any) -> None:
    form = form_of(head)
    assert form is not None
    assert len(json.loads(form.encode({"a": np.ones(1), "b": np.ones(1)})[0])["outputs"]) == 2


def test_the_format_may_be_in_the_body() -> None:
    request = Input("1", {FORMAT_HEADER: json.dumps({**TOLD, IN_BODY: True})}, [])
    form = AnswerFormat.of(request, {"body": {"id": "9"}})
    assert form is not None
    assert json.loads(form.encode(1)[0])["id"] == "9"
    for body in (b"no JSON", None, [1], {"parameters": 5}):
        form = AnswerFormat.of(request, {"body": body})
        assert form is not None
        assert json.loads(form.encode(1)[0])["id"] == "7"
