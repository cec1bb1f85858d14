"""The binary extension through the envelope that speaks it."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.handlers.request_envelope.binary_tensors import read_request, to_buffer
from marserve.handlers.request_envelope.kservev2 import KServev2Envelope

HEADER = "Inference-Header-Content-Length"
FLOATS = np.float32([[1, 2], [3, 4]])


def tensor(datatype, shape, buffer, name="x", **parameters):
    """An input and its bytes; parameters win over what is true."""
    parameters = {"binary_data_size": len(buffer), **parameters}
    described = {"name": name, "shape": [*shape], "datatype": datatype, "parameters": parameters}
    return described, buffer


def floats(name="x", **parameters):
    return tensor("FP32", [2, 2], FLOATS.tobytes(), name, **parameters)


def in_bytes(*elements):
    return b"".join(struct.pack("<I", len(item)) + item for item in elements)


def request(*tensors, header=HEADER, length=None, **members):
    """A row and its headers."""
    text = json.dumps({"inputs": [item for item, _ in tensors], **members}).encode()
    body = b"".join([text, *(buffer for _, buffer in tensors)])
    return {"body": bytearray(body)}, {header: str(len(text)) if length is None else length}


def data_of(rows):
    return [row["data"] for row in rows]


@pytest.fixture
def ask_alone(ask):
    """Send requests as `request` makes them; gives answers, what the handler saw, the context."""

    def run(*requests, handler=data_of):
        rows, headers = zip(*requests, strict=True)
        return ask(KServev2Envelope, *rows, handler=handler, headers=[*headers])

    return run


# -- what comes in ---------------------------------------------------------------------------------

NUMBERS = {
    "UINT8": "u1",
    "UINT16": "u2",
    "UINT32": "u4",
    "UINT64": "u8",
    "INT8": "i1",
    "INT16": "i2",
    "INT32": "i4",
    "INT64": "i8",
    "FP16": "f2",
    "FP32": "f4",
    "FP64": "f8",
}


@pytest.mark.parametrize(("datatype", "dtype"), NUMBERS.items())
def test_numbers_are_those_of_json(ask_alone, datatype, dtype):
    _, seen, _ = ask_alone(
        request(tensor(datatype, [2, 1], np.array([[1], [100]], dtype).tobytes()))
    )
    assert seen == [{"name": "x", "shape": [2, 1], "datatype": datatype, "data": [[1], [100]]}]
    assert type(seen[0]["data"][0][0]) is (float if dtype[0] == "f" else int)


@pytest.mark.parametrize(
    ("datatype", "buffer", "data"),
    [
        ("BOOL", b"\1\0", [True, False]),
        ("BF16", b"\xc0\x3f\x00\xc0", [1.5, -2.0]),
        ("BYTES", in_bytes(b"gr\xc3\xbcn", b"more"), "gr\u00fcn"),
        ("BYTES", in_bytes(b"", b"more"), ""),
        ("BYTES", in_bytes(b"\xff\xd8", b"more"), b"\xff\xd8"),
    ],
)
def test_other_types(ask_alone, datatype, buffer, data):
    _, seen, _ = ask_alone(request(tensor(datatype, [2], buffer)), handler=lambda _: [0])
    assert data_of(seen) == [data]


def test_several_inputs_some_of_them_in_the_json(ask_alone):
    middle = {"name": "y", "shape": [1], "datatype": "INT64", "data": [7]}, b""
    last = tensor("INT8", [2], b"\1\2", "z", mine=True)
    _, seen, context = ask_alone(request(floats(), middle, last))
    assert data_of(seen) == [FLOATS.tolist(), [7], [1, 2]]
    assert seen[2]["parameters"] == {"mine": True}
    assert context.input_names == ["x", "y", "z"]


def test_the_spelling_of_the_header_does_not_matter(ask_alone):
    _, seen, _ = ask_alone(request(floats(), header=HEADER.upper()))
    assert data_of(seen) == [FLOATS.tolist()]


BAD = {
    "the header is no number": request(floats(), length="ten"),
    "the header is negative": request(floats(), length="-1"),
    "the header is beyond the body": request(floats(), length="9999"),
    "the header cuts the JSON": request(floats(), length="20"),
    "the header reaches into the tensor": request(floats(), length="110"),
    "no header": ({"body": {"inputs": [floats()[0]]}}, {}),
    "size beyond the body": request(floats(binary_data_size=17)),
    "size below the tensor": request(floats(binary_data_size=12)),
    "size that cuts a number": request(floats(binary_data_size=15)),
    "negative size": request(floats(binary_data_size=-1)),
    "size that is no number": request(floats(binary_data_size="16")),
    "size that is a flag": request(tensor("UINT8", [1], b"\1", binary_data_size=True)),
    "too many bytes": request(floats(), ({**floats()[0], "parameters": {}, "data": []}, b"x")),
    "another shape": request(tensor("FP32", [3], FLOATS.tobytes())),
    "a shape that is none": request(tensor("FP32", ["a"], FLOATS.tobytes())),
    "unknown datatype": request(tensor("FLOAT", [2, 2], FLOATS.tobytes())),
    "no element": request(tensor("BYTES", [0], b"")),
    "element cut short": request(tensor("BYTES", [1], b"\5\0\0\0abcd")),
    "length of an element cut short": request(tensor("BYTES", [1], in_bytes(b"a") + b"\1\0")),
    "compressed": ({"body": bytearray(b"\x1f\x8b")}, {"content-encoding": "gzip"}),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_lengths_that_do_not_fit_cost_only_their_request_its_answer(ask_alone, bad):
    answers, seen, context = ask_alone(request(floats("a")), bad, request(floats("b")))
    assert [item["name"] for item in seen] == ["a", "b"]
    assert [answers[i]["outputs"][0]["data"] for i in (0, 2)] == [[1.0, 2.0, 3.0, 4.0]] * 2
    assert answers[1]["code"] == context.get_response_status(1)[0] == 400
    assert answers[1]["error"] == answers[1]["message"] != ""


def test_a_request_alone_hears_what_is_wrong(ask_alone):
    answers, seen, context = ask_alone(request(floats(binary_data_size=17)))
    assert seen is None
    assert answers == [
        {
            "code": 400,
            "type": "BadRequestException",
            "message": "Input 'x': binary_data_size is 17; there are 16 bytes.",
            "error": "Input 'x': binary_data_size is 17; there are 16 bytes.",
        }
    ]
    assert context.get_response_content_type(0) == "application/json"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(floats(), length="5"), "The first 5 bytes are not JSON: "),
        (
            request(tensor("FP12", [1], b"abcd")),
            "Input 'x': 4 bytes are no FP12 of shape [1]: the protocol has no such datatype",
        ),
    ],
)
def test_the_message_names_the_cause(ask_alone, bad, message):
    [answer], _, _ = ask_alone(bad)
    assert answer["message"].startswith(message)


def test_where_all_are_wrong_each_gets_its_own(ask_alone):
    answers, seen, context = ask_alone(
        request(floats(binary_data_size=17)), ({"body": b"{"}, {}), request(floats(), length="x")
    )
    assert seen is None
    assert [item["code"] for item in answers] == [400, 400, 400]
    assert [context.get_response_status(i)[0] for i in range(3)] == [400, 400, 400]
    assert answers[1]["message"].startswith("The body is not JSON: ")
    assert HEADER in answers[2]["message"]


# -- what goes out ---------------------------------------------------------------------------------


def taken_apart(answer, headers):
    """The JSON of an answer, and the bytes behind it."""
    end = int(headers[HEADER])
    return json.loads(answer[:end]), answer[end:]


def test_outputs_as_bytes(ask_alone):
    inputs = [floats(), tensor("INT64", [1], np.int64([7]).tobytes(), "y")]
    [answer], _, context = ask_alone(request(*inputs, parameters={"binary_data_output": True}))
    document, remaining = taken_apart(answer, context.get_response_headers(0))
    assert context.get_response_content_type(0) == "application/octet-stream"
    assert document["outputs"] == [
        {
            "name": "x",
            "datatype": "FP64",
            "shape": [2, 2],
            "parameters": {"binary_data_size": 32},
        },
        {"name": "y", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 8}},
    ]
    assert remaining == FLOATS.astype("f8").tobytes() + np.int64([7]).tobytes()


@pytest.mark.parametrize(
    ("result", "elements"),
    [
        (["tabby", "gr\u00fcn"], [b"tabby", b"gr\xc3\xbcn"]),
        ({"tabby": 0.5}, [b'{"tabby": 0.5}']),
        (["tabby", None], [b"tabby", b"null"]),
        (b"\xff\0", [b"\xff\0"]),
        ([b"\xff\0", b""], [b"\xff\0", b""]),
    ],
)
def test_texts_and_anything_else_as_bytes(ask_alone, result, elements):
    asked = request(floats(), parameters={"binary_data_output": True})
    [answer], _, context = ask_alone(asked, handler=lambda rows: [result])
    document, remaining = taken_apart(answer, context.get_response_headers(0))
    assert document["outputs"][0]["datatype"] == "BYTES"
    assert remaining == in_bytes(*elements)


def test_each_output_may_choose(ask_alone):
    asked = request(
        floats(),
        floats("y"),
        parameters={"binary_data_output": True},
        outputs=[{"name": "x", "parameters": {"binary_data": False}}, {"name": "y"}],
    )
    [answer], _, context = ask_alone(asked)
    document, remaining = taken_apart(answer, context.get_response_headers(0))
    assert document["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0]
    assert "data" not in document["outputs"][1]
    assert remaining == FLOATS.astype("f8").tobytes()


def test_an_error_is_never_in_bytes(ask_alone, make_context, ask):
    context = make_context()
    rows, headers = request(floats(), parameters={"binary_data_output": True})

    def refuse(data):
        context.set_response_status(422, "", 0)
        return [{"message": "No kitten in it."}]

    [answer], _, _ = ask(KServev2Envelope, rows, handler=refuse, headers=[headers], context=context)
    assert answer["error"] == "No kitten in it."
    assert context.get_response_headers(0) == {"content-type": "application/json"}


@given(st.sampled_from([*NUMBERS]), st.lists(st.integers(0, 127), max_size=9))
def test_what_went_out_comes_in_again(datatype, numbers):
    values = np.array(numbers, NUMBERS[datatype])
    row, headers = request(tensor(datatype, values.shape, to_buffer(values, datatype)))
    [read] = read_request(bytes(row["body"]), headers)["inputs"]
    assert read["data"].tolist() == numbers
