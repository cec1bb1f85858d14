import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from marserve.backend.tensors import datatypes
from marserve.backend.tensors.datatypes import UnusableTensor
from marserve.backend.tensors.outputs import outputs_of


def described(result: Any, name: str = "") -> list[tuple[str, str, list[int], Any]]:
    return [
        (
            output.name,
            output.datatype,
            output.shape,
            list(datatypes.read_elements(output.buffer))
            if output.datatype == "BYTES"
            else datatypes.read_numbers(output.datatype, output.buffer),
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
def test_whatever_a_handler_returns_becomes_outputs(result, outputs):
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
        ({"shape": [math.inf], "data": [1]}, "no usable shape"),
    ],
    ids=repr,
)
def test_outputs_that_cannot_be_sent_say_why(output, sentence):
    with pytest.raises(UnusableTensor) as caught:
        outputs_of({"outputs": [{"name": "y", **output}]}, "")
    assert sentence in str(caught.value)
