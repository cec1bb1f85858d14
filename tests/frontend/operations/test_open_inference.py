import json
import struct
from collections.abc import Generator
from typing import Any

import pytest

from marserve.backend.protocol import TENSORS_TYPE, Input, Part, Prediction
from marserve.backend.tensors import datatypes
from marserve.backend.tensors.wire import FORMAT_HEADER, LENGTH_HEADER, SIZE
from marserve.frontend.errors import BadRequest, PredictionFailed
from marserve.frontend.operations.open_inference import (
    AskedModel,
    InferRequest,
    input_of,
    input_of_body,
)
from marserve.frontend.operations.open_inference_answers import answer_of, piece_of

MODEL = AskedModel("m", "1")
FLOATS = struct.pack("<2f", 1, 2)


def done(steps: Generator[None, None, Any]) -> Any:
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


def request_of(datatype: str, shape: Any, buffer: bytes, **more: Any) -> InferRequest:
    tensor = {"name": "x", "datatype": datatype, "shape": shape}
    return InferRequest({"id": "7", "inputs": [tensor], **more}, [buffer])


def input_from(request: InferRequest, envelope: str = "") -> Input:
    made = done(input_of(request, "id", {"a": "b"}, AskedModel("m", "1", envelope)))
    assert isinstance(made, Input)
    return made


def test_the_worker_gets_the_bytes_behind_one_line_of_json():
    input_ = input_from(request_of("FP32", [2], FLOATS, outputs=[{"name": "y"}]))
    (part,) = input_.parts
    assert (part.name, part.content_type) == ("body", TENSORS_TYPE)
    head, _, rest = bytes(part.body).partition(b"\n")
    assert rest == FLOATS
    assert json.loads(head)["inputs"][0]["parameters"] == {SIZE: 8}
    assert json.loads(input_.headers[FORMAT_HEADER]) == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "outputs": [{"name": "y"}],
        "parameters": {},
    }
    assert input_.headers["a"] == "b"


def test_the_envelope_gets_what_it_reads_of_rest():
    input_ = input_from(request_of("FP32", [2], FLOATS), "kservev2")
    (part,) = input_.parts
    end = int(input_.headers[LENGTH_HEADER])
    assert part.content_type == "application/octet-stream"
    assert part.body[end:] == FLOATS
    assert json.loads(part.body[:end])["id"] == "7"
    assert FORMAT_HEADER not in input_.headers


@pytest.mark.parametrize(
    ("datatype", "shape", "buffer"),
    [
        ("FP32", [-1], FLOATS),
        ("FP32", [1, -1, 2], FLOATS),
        ("FP32", [0, 5], b""),
        ("BF16", [2, 2], FLOATS),
        ("BYTES", [2], datatypes.write_elements([b"", b"a"])),
        ("BYTES", [0], b""),
        ("BOOL", [], b"\1"),
        ("BYTES", [10_000], bytes(40_000)),
    ],
)
def test_bytes_that_fit_their_shape(datatype, shape, buffer):
    assert input_from(request_of(datatype, shape, buffer))


@pytest.mark.parametrize(
    ("datatype", "shape", "buffer", "sentence"),
    [
        ("FP32", [3], FLOATS, "has 8 bytes; its shape [3] wants 3 FP32"),
        ("FP32", [1], FLOATS[:7], "has 7 bytes; its shape [1] wants 1 FP32"),
        ("FP32", [-1, 3], FLOATS, "its shape [-1, 3] wants 0 FP32"),
        ("FP32", [-1, -1], FLOATS, "has the length -1"),
        ("FP32", [2**62, 2**62], FLOATS, "more elements than any message"),
        ("FP32", [-(2**63)], FLOATS, "has the length -9223372036854775808"),
        ("FP32", [1] * 100, FLOATS, "100 dimensions"),
        ("FP128", [1], FLOATS, "'FP128'"),
        ("x" * 10_000, [1], FLOATS, "x" * 80),
        ("BYTES", [2], datatypes.write_elements([b"a"]), "has 1 elements; its shape [2] wants 2"),
        ("BYTES", [1], b"\xff\xff\xff\xffa", "longer than its bytes"),
        ("BYTES", [1], b"\1", "longer than its bytes"),
    ],
)
def test_bytes_that_do_not(datatype, shape, buffer, sentence):
    with pytest.raises(BadRequest) as caught:
        input_from(request_of(datatype, shape, buffer))
    assert sentence in caught.value.message
    assert len(caught.value.message) < 400


def test_typed_elements_go_as_torchserve_sends_them():
    request = request_of("BYTES", [1], datatypes.write_elements([b"a"]))
    request.is_typed = True
    head = json.loads(bytes(input_from(request).parts[0].body).partition(b"\n")[0])
    assert head["inputs"][0]["parameters"]["binary_data_encoding"] == "base64"


@pytest.mark.parametrize(
    ("member", "name"),
    [("inputs", "shared_memory_region"), ("outputs", "classification")],
)
def test_extensions_that_are_not_offered_are_refused(member, name):
    request = request_of("FP32", [2], FLOATS, outputs=[{"name": "y"}])
    request.head[member][0]["parameters"] = {name: "r"}
    with pytest.raises(BadRequest, match="not supported"):
        input_from(request)


# -- HTTP ------------------------------------------------------------------------------------------


def body_input(body: bytes, length: str | None, content_type: str = "") -> Input:
    headers = {} if length is None else {LENGTH_HEADER.lower(): length}
    return Input("id", headers, [Part("body", content_type, body)])


def head_of(*inputs: Any) -> bytes:
    return json.dumps({"inputs": list(inputs)}).encode()


def tensor(size: Any, name: str = "x") -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": [2], "parameters": {SIZE: size}}


def test_a_body_with_tensors_behind_its_json():
    json_input = {"name": "j", "datatype": "INT8", "shape": [1], "data": [5]}
    head = head_of(tensor(8), json_input, tensor(8, "z"))
    input_ = body_input(head + 2 * FLOATS, str(len(head)))
    made = done(input_of_body(input_, MODEL))
    assert made.parts[0].content_type == TENSORS_TYPE
    assert made.parts[0].body.endswith(b"\n" + 2 * FLOATS)


def test_bodies_that_are_passed_on_as_they_came():
    for input_, envelope in (
        (body_input(b"{}", None), ""),
        (body_input(b"{}", "2"), "kservev2"),
        (Input("id", {LENGTH_HEADER: "2"}, [Part("a", "", b""), Part("b", "", b"")]), ""),
    ):
        parts = list(input_.parts)
        assert done(input_of_body(input_, AskedModel("m", "1", envelope))) is input_
        assert input_.parts == parts


def test_a_model_that_declares_tensors_always_gets_a_document():
    made = done(input_of_body(body_input(b"{}", None), AskedModel("m", "1", is_declared=True)))
    assert made.parts[0].content_type == "application/json"
    assert FORMAT_HEADER in made.headers


@pytest.mark.parametrize(
    ("body", "length", "sentence"),
    [
        (b"{}", "3", "is '3'; the body has 2 bytes"),
        (b"{}", "-1", "is '-1'"),
        (b"{}", "9" * 5000, "is '99999999999999999999'"),
        (b"{x", "2", "The first 2 bytes are not JSON"),
        (b"[" * 60_000, "60000", "are not JSON"),
        (b" " * 70_000, "70000", "there may be 65536 bytes of JSON"),
        (b"{}", "2", "inputs must be a list"),
        (head_of(tensor(9)) + FLOATS, None, "binary_data_size is 9; there are 8 bytes"),
        (head_of(tensor(-1)) + FLOATS, None, "binary_data_size is -1"),
        (head_of(tensor("8")) + FLOATS, None, "binary_data_size is 8"),
        (head_of(tensor(2**70)) + FLOATS, None, "binary_data_size is 1180591620717411303"),
        (head_of(tensor(8)) + 2 * FLOATS, None, "has 8 bytes more than its inputs"),
        (head_of(tensor(8), tensor(8)) + FLOATS, None, "there are 0 bytes"),
    ],
)
def test_bodies_that_lie(body, length, sentence):
    if length is None:
        length = str(body.rindex(b"}") + 1)
    with pytest.raises(BadRequest) as caught:
        done(input_of_body(body_input(body, length), MODEL))
    assert sentence in caught.value.message


# -- answers ---------------------------------------------------------------------------------------

OUTPUT = {"name": "y", "datatype": "FP32", "shape": [2]}


def test_an_answer_with_bytes_behind_its_json():
    head = json.dumps({"id": "7", "outputs": [{**OUTPUT, "parameters": {SIZE: 8}}]}).encode()
    answer = answer_of(Prediction(head + FLOATS, headers={LENGTH_HEADER: str(len(head))}))
    (output,) = answer.outputs
    assert (answer.id, answer.model_version) == ("7", "")
    assert (output.name, output.shape, bytes(output.buffer)) == ("y", [2], FLOATS)
    assert output.parameters == {}


def test_an_answer_in_json():
    answer = answer_of(Prediction(json.dumps({"outputs": [{**OUTPUT, "data": [1, 2]}]}).encode()))
    assert answer.outputs[0].buffer == FLOATS


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"5",
        b"{}",
        b'{"outputs": [{}]}',
        b'{"outputs": 1}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1e999], "data": []}]}',
        b"\xff",
        b"[" * 9999,
    ],
)
def test_an_answer_that_is_none_is_the_models_fault(body):
    with pytest.raises(PredictionFailed) as caught:
        answer_of(Prediction(body))
    assert caught.value.status == 500


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"error": "no cats", "message": "x"}', "no cats"),
        (b'{"message": "no cats"}', "no cats"),
        (b"no cats", "no cats"),
        (b"[]", "[]"),
        (b"", "Unprocessable"),
    ],
)
def test_an_error_of_the_handler_keeps_status_and_sentence(body, sentence):
    with pytest.raises(PredictionFailed) as caught:
        answer_of(Prediction(body, 422, "Unprocessable"))
    assert (caught.value.status, caught.value.message) == (422, sentence)


def test_a_piece_has_its_json_in_the_first_line():
    head = json.dumps({"outputs": [{**OUTPUT, "parameters": {SIZE: 8}}]}).encode() + b"\n"
    assert bytes(piece_of(head + FLOATS).outputs[0].buffer) == FLOATS


@pytest.mark.parametrize("body", [b"token", b"a\nb", b"{}\n"])
def test_any_other_piece_is_one_element_of_bytes(body):
    (output,) = piece_of(body).outputs
    assert (output.datatype, list(datatypes.read_elements(output.buffer))) == ("BYTES", [body])


def test_outputs_that_are_null_ask_for_all():
    assert input_from(request_of("FP32", [2], FLOATS, outputs=None))


def test_a_handlers_own_header_of_the_length_is_the_models_fault():
    with pytest.raises(PredictionFailed):
        answer_of(Prediction(b"{}", headers={LENGTH_HEADER: "many"}))
