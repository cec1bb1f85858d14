"""Tensors of the Open Inference Protocol: their bytes, and their values as plain lists.

As bytes, numbers are little-endian and row by row, and each element of BYTES stands behind its own
length in four bytes. Only the standard library is used: a handler need not have numpy.

`struct` does the work, because it knows FP16 and the byte order, which `array` does not: 262,144
numbers of FP32 take 4 ms to read, and 8 ms to write.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from marserve.backend.protocol import Buffer

_CODES = (
    {"BOOL": "?", "FP16": "e", "FP32": "f", "FP64": "d"}
    | {"INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q"}
    | {"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"}
)
#: The same, as numpy names them; it has no BF16.
NUMPY = (
    {"BOOL": "?", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
    | {"INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8"}
    | {"UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8"}
)
#: Bytes of one number, by datatype; an element of BYTES has any length.
ITEM_BYTES = {name: struct.calcsize(f"<{code}") for name, code in _CODES.items()} | {"BF16": 2}
BYTES = "BYTES"
DATATYPES = (*ITEM_BYTES, BYTES)

#: The rule of `is_declaration`, in words.
DECLARATION = (
    "a map of inputs and outputs to lists of tensors, each with name, datatype "
    f"({', '.join(DATATYPES)}) and shape (a list of lengths, -1 for any), and arrays: true or false"
)

_LENGTH = struct.Struct("<I")
# More elements than any message has room for.
_MAX_ELEMENTS = 1 << 40
_MAX_LENGTH = 2**31 - 1
_MAX_DIMENSIONS = 64  # as many as numpy can have


class UnusableTensor(ValueError):
    """A tensor whose parts do not fit each other; the text is a sentence for its author."""


def is_declaration(value: Any) -> bool:
    """Whether a value declares a model's tensors: ``inputs``, ``outputs``, and ``arrays``."""
    return isinstance(value, dict) and all(
        isinstance(member, bool)
        if key == "arrays"
        else key in ("inputs", "outputs")
        and isinstance(member, list)
        and all(map(_is_tensor, member))
        for key, member in value.items()
    )


def _is_tensor(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "datatype", "shape"}
        and isinstance(value["name"], str)
        and value["datatype"] in DATATYPES
        and isinstance(value["shape"], list)
        and all(type(length) is int and -1 <= length <= _MAX_LENGTH for length in value["shape"])
    )


def element_count(shape: Sequence[int]) -> int:
    """How many elements a tensor of this shape has.

    Raises:
        UnusableTensor: A length is negative, or there are too many.
    """
    if len(shape) > _MAX_DIMENSIONS:
        raise UnusableTensor(f"has {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are possible")
    count = 1
    for length in shape:
        if length < 0:
            raise UnusableTensor(f"has the length {length} in its shape")
        count *= length
    if count > _MAX_ELEMENTS:
        raise UnusableTensor("has more elements than any message has room for")
    return count


def read_numbers(datatype: str, buffer: Buffer) -> list[Any]:
    """The numbers of a buffer whose length is a multiple of the datatype's."""
    if datatype == "BF16":  # the upper half of an FP32
        wide = bytearray(2 * len(buffer))
        wide[2::4], wide[3::4] = buffer[0::2], buffer[1::2]
        datatype, buffer = "FP32", wide
    return list(struct.unpack(f"<{len(buffer) // ITEM_BYTES[datatype]}{_CODES[datatype]}", buffer))


def write_numbers(datatype: str, values: Sequence[Any]) -> bytes:
    """Make the buffer of numbers.

    Raises:
        UnusableTensor: A value is no number of this datatype.
    """
    if datatype == "BF16":
        return _rounded(write_numbers("FP32", values))
    try:
        return struct.pack(f"<{len(values)}{_CODES[datatype]}", *values)
    except (struct.error, OverflowError, TypeError) as error:
        raise UnusableTensor(f"has a value that is no {datatype}: {error}") from error


def read_elements(buffer: Buffer) -> Iterator[bytes]:
    """The elements of BYTES.

    Raises:
        UnusableTensor: The buffer ends within an element.
    """
    at, end = 0, len(buffer)
    while at < end:
        start = at + _LENGTH.size
        if start <= end:
            at = start + _LENGTH.unpack_from(buffer, start - _LENGTH.size)[0]
        if start > end or at > end:
            raise UnusableTensor("has an element that is longer than its bytes")
        yield bytes(buffer[start:at])


def write_elements(elements: Iterable[bytes]) -> bytes:
    """Make the buffer of elements of BYTES."""
    return b"".join(_LENGTH.pack(len(element)) + element for element in elements)


def nested_shape(values: Any) -> list[int]:
    """The shape of nested lists, as their first items tell; [] for what is no list."""
    shape = []
    while isinstance(values, list | tuple):
        shape.append(len(values))
        if not values:
            break
        values = values[0]
    return shape


def flattened(values: Any, shape: Sequence[int]) -> list[Any]:
    """The items of nested lists.

    Raises:
        UnusableTensor: The lists are not all as long as the shape says.
    """
    rows = [values]
    for length in shape:
        for row in rows:
            if not isinstance(row, list | tuple) or len(row) != length:
                raise UnusableTensor("has lists of different lengths")
        rows = [item for row in rows for item in row]
    return rows


def _rounded(wide: bytes) -> bytes:
    """FP32 as BF16, each rounded to the nearest, and to the even one of two."""
    words = struct.unpack(f"<{len(wide) // 4}I", wide)
    # What is not a number must not become infinite when its last bits go.
    halves = [
        word >> 16 | 0x40
        if word & 0x7FFFFFFF > 0x7F800000
        else (word + 0x7FFF + (word >> 16 & 1)) >> 16
        for word in words
    ]
    return struct.pack(f"<{len(halves)}H", *halves)
