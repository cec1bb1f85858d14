"""Requests with tensors as bytes, as the documents that handlers get.

The values of each tensor are in its ``data``, as one flat list. For a handler that takes arrays
they are an array of numpy in the tensor's shape, since 262,144 numbers are a list of 10 MB.

An element of BYTES is a str if it is UTF-8, and else bytes, which JSON could not have carried.
"""

import base64
from typing import Any

from marserve.backend.protocol import Buffer
from marserve.backend.tensors.arrays import flat_array
from marserve.backend.tensors.datatypes import BYTES, read_elements, read_numbers, text_or_bytes
from marserve.backend.tensors.rows import one_row_of
from marserve.backend.tensors.wire import ARRAYS, BinaryInput, Json, unpack_request


def document_of(body: Buffer, *, as_lists: bool = False) -> Json:
    """Return the document of a request; ``as_lists`` even for a handler that takes arrays.

    Raises one of `wire.UNREADABLE` for a client's own body of this type.
    """
    head, columns = _read(body, as_lists=as_lists)
    for tensor, values in columns:
        tensor["data"] = _shaped(values, tensor["shape"])
    return head


def documents_of(body: Buffer, rows: int, dim: int, *, as_lists: bool = False) -> list[Json]:
    """Return a document for each row of a block, whose bytes are row after row."""
    head, columns = _read(body, as_lists=as_lists)
    inputs = []
    for tensor, values in columns:
        shape, step = one_row_of(tensor["shape"], dim), len(values) // rows
        pieces = [values[row * step : (row + 1) * step] for row in range(rows)]
        inputs.append(
            [{**tensor, "shape": shape, "data": _shaped(piece, shape)} for piece in pieces]
        )
    return [{**head, "inputs": list(row)} for row in zip(*inputs, strict=True)]


def _read(body: Buffer, *, as_lists: bool) -> tuple[Json, list[tuple[Json, Any]]]:
    """Return the JSON, and the inputs that are bytes with their values, flat."""
    head, inputs = unpack_request(body)
    takes_arrays = head.pop(ARRAYS, False) and not as_lists
    return head, [(each.described, _values(each, takes_arrays=takes_arrays)) for each in inputs]


def _values(tensor: BinaryInput, *, takes_arrays: bool) -> Any:
    datatype = tensor.described["datatype"]
    if takes_arrays:
        return flat_array(datatype, tensor.buffer)
    if datatype != BYTES:
        return read_numbers(datatype, tensor.buffer)
    elements = read_elements(tensor.buffer)
    if tensor.encoding:
        return [base64.b64encode(element).decode() for element in elements]
    return list(map(text_or_bytes, elements))


def _shaped(values: Any, shape: list[int]) -> Any:
    return values if isinstance(values, list) else values.reshape(shape)
