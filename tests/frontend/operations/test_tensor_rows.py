import json
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.protocol import Input, Part, Prediction
from marserve.backend.tensors import datatypes
from marserve.frontend.batching.rows import in_blocks
from marserve.frontend.errors import BadRequest
from marserve.frontend.operations.json_tensors import as_bytes, read_document
from marserve.frontend.operations.open_inference import AskedModel, InferRequest, input_of
from marserve.frontend.operations.tensor_rows import TensorRows, swapped


def done(steps: Generator[None, None, Any]) -> Any:
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


lengths = st.integers(0, 6)


@given(lengths, lengths, lengths, st.sampled_from(["UINT8", "FP16", "INT32", "FP64", "BYTES"]))
def test_dimensions_change_places(first, second, inner, datatype):
    count = first * second * inner
    if datatype == "BYTES":
        texts = [str(number).encode() * (number % 3) for number in range(count)]
        buffer, dtype = datatypes.write_elements(texts), None
        values = np.array([*texts, None], object)[:-1]
    else:
        values = np.arange(count).astype(dtype := datatypes.NUMPY[datatype])
        buffer = values.tobytes()
    expected = np.swapaxes(values.reshape(first, second, inner), 0, 1).ravel()
    moved = done(swapped(buffer, datatype, first, second, inner))
    if dtype is None:
        assert list(datatypes.read_elements(moved)) == expected.tolist()
    else:
        assert bytes(moved) == expected.tobytes()


@given(st.data())
def test_rows_that_travel_in_any_blocks_come_back_as_they_were(data):
    """Cut, batched in whatever parts, answered with the same tensors, and joined."""
    dim = data.draw(st.integers(0, 2))
    shape = [data.draw(st.integers(1, 4)) for _ in range(3)]
    shape[dim] = rows = data.draw(st.integers(2, 9))
    x = np.arange(np.prod(shape), dtype="<i4").reshape(shape)
    texts = np.array([str(n) * (n % 4) for n in range(x.size)], object).reshape(shape)
    elements = datatypes.write_elements(text.encode() for text in texts.ravel())
    head = {
        "id": "7",
        "inputs": [
            {"name": "x", "datatype": "INT32", "shape": shape},
            {"name": "t", "datatype": "BYTES", "shape": shape},
        ],
    }
    model = AskedModel("m", "1", takes_bytes=True, dims=(dim, dim), max_rows=100)
    made = done(input_of(InferRequest(head, [x.tobytes(), elements]), "id", {}, model))
    assert isinstance(made, TensorRows)
    assert len(made.rows) == rows
    predictions = []
    while len(predictions) < rows:
        count = data.draw(st.integers(1, rows - len(predictions)))
        [block], [told] = in_blocks(made.rows[len(predictions) : len(predictions) + count])
        assert told == count
        predictions += answered(block, count)
    answer = done(made.joined(predictions))
    assert [output.shape for output in answer.outputs] == [shape, shape]
    assert bytes(answer.outputs[0].buffer) == x.tobytes()
    assert bytes(answer.outputs[1].buffer) == elements


def answered(block: Input, count: int) -> list[Prediction]:
    """The answer of a handler that returns what it got."""
    from marserve.frontend.batching.rows import for_each_row

    head, _, buffers = bytes(block.parts[0].body).partition(b"\n")
    document = json.loads(head)
    text = json.dumps({"outputs": document["inputs"]}).encode() + b"\n"
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return for_each_row([Prediction(text + buffers, headers=headers)], [count])


def test_a_row_for_each_seat_and_one_to_be_refused():
    head = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2**40, 0]}]}
    model = AskedModel("m", "1", takes_bytes=True, dims=(0, 0), max_rows=3)
    made = done(input_of(InferRequest(head, [b""]), "id", {}, model))
    assert len(made.rows) == 4
    assert made.rows[0].parts == [Part("x", "", memoryview(b""))]


# -- JSON ------------------------------------------------------------------------------------------


def large(**tensor: Any) -> bytes:
    described = {"name": "x", "datatype": "INT32", "shape": [20_000], **tensor}
    return json.dumps({"id": "7", "inputs": [{"name": "y"} | described], "more": [{}]}).encode()


@pytest.mark.parametrize(
    "data",
    [[*range(20_000)], [[n, n + 1] for n in range(0, 20_000, 2)], [[[n] for n in range(20_000)]]],
    ids=["flat", "nested", "deeper"],
)
def test_large_lists_of_numbers(data):
    head = done(read_document(large(data=data)))
    assert (head["id"], head["more"]) == ("7", [{}])
    assert done(as_bytes(head["inputs"][0])) == np.arange(20_000, dtype="<i4").tobytes()


def test_large_lists_of_texts():
    texts = [f'"{n}",[]' for n in range(10_000)]
    head = done(read_document(large(datatype="BYTES", data=[texts])))
    found = done(as_bytes(head["inputs"][0]))
    assert list(datatypes.read_elements(found)) == [text.encode() for text in texts]


@pytest.mark.parametrize(
    "numbers", ["1,,2", "1 2", "[1", "{}", '"a"', "null", "1.5", "3000000000", "--1", "1,"]
)
def test_large_lists_of_something_else(numbers):
    body = large(data=0).replace(b'"data": 0', b'"data": [%b1]' % (b"1," * 40_000))
    body = body.replace(b"1]", numbers.encode() + b"]")
    head = done(read_document(body))
    if head is None:  # it was no JSON at all
        return
    with pytest.raises(BadRequest, match="Input 'x'"):
        done(as_bytes(head["inputs"][0]))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"inputs": 5}',
        b"text",
        b'{"inputs": [',
        b"\xff",
        b'{"a": "%b"}' % (b"x" * 70000),
        b'{"inputs": [%b' % (b"[" * 70000),
        b" " * 70000,
    ],
    ids=lambda body: str(body[:20]),
)
def test_what_is_no_request_is_left_alone(body):
    assert done(read_document(body)) is None


@pytest.mark.parametrize("filler", [{"a": "x" * 70_000}, {"inputs": [{"x": "y" * 70_000}]}])
def test_more_than_a_little_beside_the_data_is_refused(filler):
    document = {"inputs": [{"name": "x", "datatype": "INT8", "shape": [1], "data": [1]}], **filler}
    with pytest.raises(BadRequest, match="Beside the data of tensors"):
        done(read_document(json.dumps(document).encode()))
