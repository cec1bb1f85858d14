"""The datatypes of the Open Inference Protocol: their values as bytes, and as plain lists.

Numbers are little-endian and row by row; each element of BYTES follows its length in four bytes.
`struct` supports FP16 and byte orders, which `array` does not: 262,144 numbers of FP32 take 4 ms to
read, and 8 ms to write.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from marserve.backend.protocol import Buffer

#: Datatype of numbers: format of `struct`, and type of numpy. There is neither for BF16.
_NUMBERS = {
    "BOOL": ("?", "b1"),
    "FP16": ("e", "f2"),
    "FP32": ("f", "f4"),
    "FP64": ("d", "f8"),
    "INT8": ("b", "i1"),
    "INT16": ("h", "i2"),
    "INT32": ("i", "i4"),
    "INT64": ("q", "i8"),
    "UINT8": ("B", "u1"),
    "UINT16": ("H", "u2"),
    "UINT32": ("I", "u4"),
    "UINT64": ("Q", "u8"),
}
BF16 = "BF16"
BYTES = "BYTES"
#: Types of numpy by datatype, little-endian.
NUMPY = {name: f"<{dtype}" for name, (_, dtype) in _NUMBERS.items()}
#: Bytes of one number by datatype.
ITEM_BYTES = {name: int(dtype[1]) for name, (_, dtype) in _NUMBERS.items()} | {BF16: 2}
FLOATS = frozenset({"FP16", "FP32", "FP64", BF16})
DATATYPES = (*ITEM_BYTES, BYTES)

_LENGTH = struct.Struct("<I")
_MAX_ELEMENTS = 1 << 40  # more than any message can contain
_MAX_DIMENSIONS = 64  # numpy's limit


class UnusableTensor(ValueError):
    """A tensor whose parts contradict each other; the message is a sentence for its author."""


def element_count(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of this shape; raises UnusableTensor."""
    if len(shape) > _MAX_DIMENSIONS:
        raise UnusableTensor(f"has {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are possible")
    count = 1
    for length in shape:
        if length < 0:
            raise UnusableTensor(f"has the length {length} in its shape")
        count *= length
    if count > _MAX_ELEMENTS:
        raise UnusableTensor("has more elements than any message can contain")
    return count


def read_numbers(datatype: str, buffer: Buffer) -> list[Any]:
    """Return the numbers of a buffer whose length is a multiple of the datatype's."""
    if datatype == BF16:  # the upper half of an FP32
        wide = bytearray(2 * len(buffer))
        wide[2::4], wide[3::4] = buffer[0::2], buffer[1::2]
        datatype, buffer = "FP32", wide
    code, _ = _NUMBERS[datatype]
    return list(struct.unpack(f"<{len(buffer) // ITEM_BYTES[datatype]}{code}", buffer))


def write_numbers(datatype: str, values: Sequence[Any]) -> bytes:
    """Return the buffer of numbers; raises UnusableTensor."""
    if datatype == BF16:
        return _rounded(write_numbers("FP32", values))
    code, _ = _NUMBERS[datatype]
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError, TypeError) as error:
        raise UnusableTensor(f"has a value that is no {datatype}: {error}") from error


def read_elements(buffer: Buffer) -> Iterator[bytes]:
    """Yield the elements of BYTES; raises UnusableTensor if the buffer ends within one."""
    at, end = 0, len(buffer)
    while at < end:
        start = at + _LENGTH.size
        if start <= end:
            at = start + _LENGTH.unpack_from(buffer, start - _LENGTH.size)[0]
        if start > end or at > end:
            raise UnusableTensor("has an element that is longer than its bytes")
        yield bytes(buffer[start:at])


def write_elements(elements: Iterable[bytes]) -> bytes:
    """Return the buffer of elements of BYTES."""
    return b"".join(_LENGTH.pack(len(element)) + element for element in elements)


def element_bytes(element: bytes) -> int:
    """Return the bytes that an element has in a buffer."""
    return _LENGTH.size + len(element)


def text_or_bytes(element: bytes) -> str | bytes:
    """Return an element as JSON would carry it: as str if it is UTF-8; else as it is."""
    try:
        return element.decode()
    except UnicodeDecodeError:
        return element


def nested_shape(values: Any) -> list[int]:
    """Return the shape of nested lists by their first items; [] for anything else."""
    shape = []
    while isinstance(values, list | tuple):
        shape.append(len(values))
        if not values:
            break
        values = values[0]
    return shape


def flattened(values: Any, shape: Sequence[int]) -> list[Any]:
    """Return the items of nested lists; raises UnusableTensor if they do not have the shape."""
    rows = [values]
    for length in shape:
        for row in rows:
            if not isinstance(row, list | tuple) or len(row) != length:
                raise UnusableTensor("has lists of different lengths")
        rows = [item for row in rows for item in row]
    return rows


def _rounded(wide: bytes) -> bytes:
    """Return FP32 as BF16, rounded to nearest, ties to even."""
    words = struct.unpack(f"<{len(wide) // 4}I", wide)
    # A NaN must not become infinite by losing its last bits.
    halves = [
        word >> 16 | 0x40
        if word & 0x7FFFFFFF > 0x7F800000
        else (word + 0x7FFF + (word >> 16 & 1)) >> 16
        for word in words
    ]
    return struct.pack(f"<{len(halves)}H", *halves)
