import json
from typing import Any

import pytest

from marserve.backend.protocol import TENSORS_TYPE, Input, Part
from marserve.frontend.batching.lengths.input_length import length_of


def tensors(*inputs: Any) -> bytes:
    return json.dumps({"inputs": inputs}).encode() + b"\n" + bytes(100)


def number_of(name: str, value: str) -> bytes:
    """A request in which the text of a number, which JSON cannot write, is one of a tensor's."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}
    if name == "size":
        tensor |= {"datatype": "BYTES", "parameters": {"binary_data_size": "?"}}
    else:
        tensor |= {"shape": ["?"]}
    return tensors(tensor).replace(b'"?"', value.encode())


def length(body: bytes) -> float:
    return length_of(Input("i", {}, [Part("body", TENSORS_TYPE, body)]))


def test_the_length_is_that_of_the_largest_tensor():
    small = {"datatype": "FP32", "shape": [2, 3]}
    text = {"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 20}}
    assert length(tensors(small)) == 6
    assert length(tensors(small, text)) == 20


@pytest.mark.parametrize("name", ["size", "shape"])
@pytest.mark.parametrize(
    "value", ["1e999", "-1e999", "NaN", "9" * 4200, "-" + "9" * 4200, "1.5", '"x"', "true", "[[2]]"]
)
def test_numbers_that_a_client_writes_in_a_part_of_this_type(name, value):
    body = number_of(name, value)
    assert length(body) == len(body)


@pytest.mark.parametrize("shape", [["x", 10**13], [[0], 10**13]])
def test_a_shape_that_a_client_writes_costs_no_memory(shape):
    body = tensors({"datatype": "FP32", "shape": shape})
    assert length(body) == len(body)
