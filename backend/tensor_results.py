"""Makes the outputs of an Open Inference Protocol answer of whatever a handler returned.

* a document with ``outputs`` (an object, or its JSON text): those outputs, each with ``name`` and
  ``data``, which may be nested lists, an array or a tensor; ``datatype`` and ``shape`` if they are
  not those of the data
* an object whose values are all arrays or tensors: these, each under its key
* an array, a tensor, a number, a text, or a list of numbers or texts: one output of the name that
  the client asked for, else ``output-0``
* anything else: one output with one element of BYTES, the JSON of it
"""

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from marserve.backend import tensors
from marserve.backend.tensors import BYTES, UnusableTensor

_DEFAULT_NAME = "output-0"
_INFERRED = {bool: "BOOL", int: "INT64", float: "FP64", str: BYTES, bytes: BYTES}
# By kind and bytes of an item, as numpy names them.
_OF_ARRAYS = {code.lstrip("<").replace("?", "b1"): name for name, code in tensors.NUMPY.items()}

Json = dict[str, Any]


@dataclass
class Output:
    """A tensor of an answer, and its bytes."""

    name: str
    datatype: str
    shape: list[int]
    buffer: bytes
    parameters: Json = field(default_factory=dict)


def outputs_of(result: Any, name: str) -> tuple[Json, list[Output]]:
    """The members of the document around the outputs, if there is one, and the outputs.

    Args:
        result: What the handler returned.
        name: Of the output, where it has none; may be empty.

    Raises:
        UnusableTensor: An output cannot be sent.
    """
    document = _document_in(result)
    if document is not None:
        return document, [
            _described_output(output, place) for place, output in enumerate(document["outputs"])
        ]
    if isinstance(result, dict) and result and all(map(is_array, result.values())):
        return {}, [_output(str(key), value) for key, value in result.items()]
    return {}, [_output(name or _DEFAULT_NAME, result)]


def _document_in(result: Any) -> Json | None:
    """The protocol's document, if a result is one or is the text of one."""
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


def _described_output(described: Json, place: int) -> Output:
    name = str(described.get("name", f"output-{place}"))
    output = _output(name, described["data"], described.get("datatype"))
    if (shape := described.get("shape")) is not None:
        try:
            shape = list(map(int, shape))
            count, there = tensors.element_count(shape), tensors.element_count(output.shape)
        except (TypeError, ValueError) as error:
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
    """The datatype, the shape and the bytes of a value."""
    if isinstance(value, list | tuple):
        value = [item.tolist() if is_array(item) else item for item in value]
    if datatype is not None and datatype not in tensors.DATATYPES:
        raise UnusableTensor(f"has the datatype {datatype!r}, which the protocol does not have")
    if is_array(value):
        own, shape, buffer = _encoded_array(value)
        if datatype in (None, own):
            return own, shape, buffer
        values = (
            list(tensors.read_elements(buffer))
            if own == BYTES
            else tensors.flattened(value.tolist(), shape)
        )
    elif datatype is None:
        datatype = _inferred(value)
        if datatype is None:
            return BYTES, [1], tensors.write_elements([_to_bytes(value)])
        shape = tensors.nested_shape(value)
        try:
            values = tensors.flattened(value, shape)
        except UnusableTensor:  # a list of lists of different lengths, say
            return BYTES, [1], tensors.write_elements([_to_bytes(value)])
        if not shape:
            shape = [1]
    else:
        shape = tensors.nested_shape(value)
        values = tensors.flattened(value, shape)
    assert datatype is not None
    if datatype == BYTES:
        return BYTES, shape, tensors.write_elements(map(_to_bytes, values))
    return datatype, shape, tensors.write_numbers(datatype, values)


def _inferred(value: Any) -> str | None:
    """The datatype of a number, a text, or nested lists of one kind of them; else None."""
    while isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        value = [item for row in value if isinstance(row, list | tuple) for item in row]
    kinds = set(map(type, value)) if isinstance(value, list | tuple) else {type(value)}
    if kinds == {int, float}:
        return "FP64"
    return _INFERRED.get(kinds.pop()) if len(kinds) == 1 else None


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy, one of its numbers, or a tensor of torch."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)) or (
        torch is not None and isinstance(value, torch.Tensor)
    )


def _encoded_array(value: Any) -> tuple[str, list[int], bytes]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:  # which numpy does not have
            halves = value.contiguous().view(torch.int16).numpy()
            return "BF16", list(value.shape), halves.astype("<i2", copy=False).tobytes()
        value = value.numpy()
    numpy = sys.modules["numpy"]
    value = numpy.asarray(value)
    shape = list(value.shape)
    kind = value.dtype.kind
    if kind in "OSU":
        return BYTES, shape, tensors.write_elements(map(_to_bytes, value.flatten().tolist()))
    datatype = _OF_ARRAYS.get(f"{kind}{value.dtype.itemsize}")
    if datatype is None:
        raise UnusableTensor(f"is an array of {value.dtype}, which the protocol does not have")
    return datatype, shape, value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


def _plain(value: Any) -> Any:
    if not is_array(value):
        raise TypeError(f"{type(value).__name__} is no value of JSON")
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
