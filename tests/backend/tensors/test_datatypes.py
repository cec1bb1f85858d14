import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.tensors import datatypes
from marserve.backend.tensors.datatypes import ITEM_BYTES, UnusableTensor

NUMPY = {
    "BOOL": "?",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    **{f"INT{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
}


@pytest.mark.parametrize("datatype", NUMPY)
@given(data=st.data())
def test_numbers_are_read_and_written_as_numpy_does(datatype, data):
    size = ITEM_BYTES[datatype]
    count = data.draw(st.integers(0, 5))
    buffer = data.draw(st.binary(min_size=count * size, max_size=count * size))
    if datatype == "BOOL":
        buffer = bytes(byte & 1 for byte in buffer)
    found = datatypes.read_numbers(datatype, buffer)
    wanted = np.frombuffer(buffer, NUMPY[datatype])
    np.testing.assert_array_equal(found, wanted.tolist())
    if not any(isinstance(value, float) and math.isnan(value) for value in found):
        assert datatypes.write_numbers(datatype, found) == buffer


@given(st.floats(width=32, allow_nan=False))
def test_bf16_is_the_nearest(value):
    torch = pytest.importorskip("torch")
    wanted = torch.tensor([value], dtype=torch.float32).to(torch.bfloat16)
    written = datatypes.write_numbers("BF16", [value])
    assert written == wanted.view(torch.int16).numpy().tobytes()
    assert datatypes.read_numbers("BF16", written) == wanted.float().tolist()


def test_what_is_no_number_stays_none_in_bf16():
    for bits in (0x7F800001, 0xFF800001, 0x7FFFFFFF):
        (value,) = struct.unpack("<f", struct.pack("<I", bits))
        assert math.isnan(
            datatypes.read_numbers("BF16", datatypes.write_numbers("BF16", [value]))[0]
        )


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("INT8", [128]),
        ("UINT64", [-1]),
        ("INT32", [1.5]),
        ("FP32", ["1"]),
        ("FP32", [1e300]),
        ("FP16", [1e6]),
        ("BF16", [None]),
    ],
)
def test_a_value_that_is_none_of_its_datatype_is_refused(datatype, values):
    with pytest.raises(UnusableTensor, match="FP32" if datatype == "BF16" else datatype):
        datatypes.write_numbers(datatype, values)


@given(st.lists(st.binary(max_size=300)))
def test_elements_come_back(elements):
    assert list(datatypes.read_elements(datatypes.write_elements(elements))) == elements


@given(st.binary(max_size=40))
def test_elements_that_lie_about_their_length_are_refused(buffer):
    try:
        elements = list(datatypes.read_elements(buffer))
    except UnusableTensor:
        return
    assert datatypes.write_elements(elements) == buffer


@pytest.mark.parametrize(("shape", "count"), [([], 1), ([2, 3], 6), ([0, 5], 0), ([1] * 64, 1)])
def test_elements_are_counted(shape, count):
    assert datatypes.element_count(shape) == count


@pytest.mark.parametrize("shape", [[-1], [2**62, 2**62], [2**63 - 1] * 64, [1] * 65])
def test_shapes_that_no_message_has_room_for_are_refused(shape):
    with pytest.raises(UnusableTensor):
        datatypes.element_count(shape)


def test_nested_lists_are_flattened():
    values = [[1, 2], [3, 4], [5, 6]]
    shape = datatypes.nested_shape(values)
    assert shape == [3, 2]
    assert datatypes.flattened(values, shape) == [1, 2, 3, 4, 5, 6]
    assert datatypes.nested_shape(5) == []
    assert datatypes.flattened(5, []) == [5]
    with pytest.raises(UnusableTensor, match="different lengths"):
        datatypes.flattened([[1, 2], [3]], [2, 2])
