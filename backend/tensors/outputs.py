"""Makes the outputs of an Open Inference Protocol answer of a handler's result.

* a document with ``outputs`` (an object, or its JSON text): those outputs, each with ``name`` and
  ``data`` (nested lists, an array or a tensor); with ``datatype`` and ``shape`` if they differ from
  those of the data
* an object whose values are all arrays or tensors: an output for each, named by its key
* an array, a tensor, a number, a text, or a list of numbers or texts: one output, with the name
  that the model declares for its only output, else the one that the client asks for, else
  ``output-0``
* anything else: one output with one element of BYTES, the result as JSON
"""

import json
from typing import Any

from marserve.backend.tensors.arrays import array_parts, is_array
from marserve.backend.tensors.datatypes import (
    BYTES,
    DATATYPES,
    UnusableTensor,
    element_count,
    flattened,
    nested_shape,
    read_elements,
    write_elements,
    write_numbers,
)
from marserve.backend.tensors.rows import Output
from marserve.backend.tensors.wire import Json

_DEFAULT_NAME = "output-0"
_INFERRED = {bool: "BOOL", int: "INT64", float: "FP64", str: BYTES, bytes: BYTES}


def outputs_of(result: Any, name: str) -> tuple[Json, list[Output]]:
    """Return the members of the document around the outputs, if there is one, and the outputs.

    ``name`` is that of an output that has none; it may be empty. Raises UnusableTensor.
    """
    document = _document_in(result)
    if document is not None:
        outputs = document["outputs"]
        default = name if len(outputs) == 1 else ""
        return document, [
            _described_output(output, default or f"output-{place}")
            for place, output in enumerate(outputs)
        ]
    if isinstance(result, dict) and result and all(map(is_array, result.values())):
        return {}, [_output(str(key), value) for key, value in result.items()]
    return {}, [_output(name or _DEFAULT_NAME, result)]


def _document_in(result: Any) -> Json | None:
    if isinstance(result, str | bytes | bytearray):
        text = result.lstrip()
        if text[:1] not in ("{", b"{", bytearray(b"{")):
            return None
        try:
            result = json.loads(text)
        except (ValueError, RecursionError):
            return None
    if isinstance(result, dict) and isinstance(result.get("outputs"), list):
        outputs = result["outputs"]
        if all(isinstance(output, dict) and "data" in output for output in outputs):
            return result
    return None


def _described_output(described: Json, default: str) -> Output:
    name = str(described.get("name", default))
    output = _output(name, described["data"], described.get("datatype"))
    if (shape := described.get("shape")) is not None:
        try:
            shape = list(map(int, shape))
            count, there = element_count(shape), element_count(output.shape)
        except (TypeError, ValueError, OverflowError) as error:
            raise UnusableTensor(f"output {name!r} has no usable shape: {error}") from error
        if count != there:
            raise UnusableTensor(f"output {name!r} has {there} elements; its shape is {shape}")
        output.shape = shape
    output.parameters = dict(described.get("parameters") or {})
    return output


def _output(name: str, value: Any, datatype: str | None = None) -> Output:
    try:
        return Output(name, *_encoded(value, datatype))
    except UnusableTensor as error:
        raise UnusableTensor(f"output {name!r} {error}") from error


def _encoded(value: Any, datatype: str | None) -> tuple[str, list[int], bytes]:
    if datatype is not None and datatype not in DATATYPES:
        raise UnusableTensor(f"has the datatype {datatype!r}, which the protocol does not have")
    if is_array(value):
        return _encoded_array(value, datatype)
    if isinstance(value, list | tuple):
        value = [item.tolist() if is_array(item) else item for item in value]
    datatype, is_inferred = datatype or _inferred(value), datatype is None
    shape = nested_shape(value)
    try:
        values = flattened(value, shape)
    except UnusableTensor:
        if not is_inferred:
            raise
        datatype = None  # lists of different lengths, for example
    if datatype is None:
        return BYTES, [1], write_elements([_to_bytes(value)])
    return datatype, shape or ([1] if is_inferred else []), _written(datatype, values)


def _encoded_array(value: Any, datatype: str | None) -> tuple[str, list[int], bytes]:
    own, shape, found = array_parts(value)
    if own == BYTES:
        found = write_elements(map(_to_bytes, found))
    assert isinstance(found, bytes)
    if datatype in (None, own):
        return own, shape, found
    assert datatype is not None
    values = list(read_elements(found)) if own == BYTES else flattened(value.tolist(), shape)
    return datatype, shape, _written(datatype, values)


def _written(datatype: str, values: list[Any]) -> bytes:
    if datatype == BYTES:
        return write_elements(map(_to_bytes, values))
    return write_numbers(datatype, values)


def _inferred(value: Any) -> str | None:
    """Return the datatype of a number, a text, or nested lists of one kind of them; else None."""
    while isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        value = [item for row in value if isinstance(row, list | tuple) for item in row]
    kinds = set(map(type, value)) if isinstance(value, list | tuple) else {type(value)}
    if kinds == {int, float}:
        return "FP64"
    return _INFERRED.get(kinds.pop()) if len(kinds) == 1 else None


def _plain(value: Any) -> Any:
    if not is_array(value):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return value.tolist()


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if not isinstance(value, str):
        try:
            value = json.dumps(value, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise UnusableTensor(f"cannot be sent: {error}") from error
    try:
        return str.encode(value)
    except UnicodeEncodeError as error:
        raise UnusableTensor(f"has text that UTF-8 cannot encode: {error}") from error
