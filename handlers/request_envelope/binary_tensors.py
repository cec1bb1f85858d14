"""Requests of the ``kservev2`` envelope with tensors as bytes behind the JSON.

Requests are converted to what they would be as JSON: an element of BYTES is a str if it is UTF-8,
and else bytes, which JSON could not have carried. With the parameter ``binary_data_encoding:
base64`` elements are in base64, which the server asks for where TorchServe did it.
"""

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marserve.backend.tensors.arrays import flat_array
from marserve.backend.tensors.checks import check_request
from marserve.backend.tensors.datatypes import (
    BYTES,
    DATATYPES,
    NUMPY,
    UnusableTensor,
    read_elements,
    text_or_bytes,
    write_elements,
)
from marserve.backend.tensors.wire import (
    LENGTH_HEADER,
    BinaryInput,
    WantedOutputs,
    binary_inputs,
)
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.request_envelope.instances import parsed_json

_LENGTH = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class TensorRequest:
    """What the answer to a request depends on."""

    id: Any = None  # the client's
    inputs: list[str] = field(default_factory=list)
    wanted: WantedOutputs = field(default_factory=WantedOutputs)

    @classmethod
    def of(cls, body: dict[str, Any]) -> "TensorRequest":
        """Read the JSON of a request."""
        id_ = body.get("id")
        return cls(
            id=id_ if id_ is not None and str(id_).strip() else None,
            inputs=[tensor["name"] for tensor in body["inputs"]],
            wanted=WantedOutputs.of(body),
        )

    def outputs_of(self, results: Any) -> list[tuple[str, Any, bool]]:
        """Return the outputs asked for: name, result, and whether it is sent as bytes."""
        wanted = self.wanted
        if not wanted.names:
            return [(self.inputs[i], result, wanted.is_binary) for i, result in enumerate(results)]
        names = list(wanted.names)
        if wanted.names.keys() <= set(self.inputs):
            names = self.inputs
        by_name = dict(zip(names, results, strict=False))
        return [
            (name, by_name[name], is_bytes)
            for name, is_bytes in wanted.names.items()
            if name in by_name
        ]


def read_request(body: Any, headers: Mapping[str, Any]) -> Any:
    """Return the JSON of a request, with the tensors behind it put into it.

    Nothing follows the JSON if the body is parsed, or the headers lack `LENGTH_HEADER`.
    """
    behind = memoryview(b"")
    if isinstance(body, str):
        body = body.encode()
    if isinstance(body, bytes | bytearray):
        end = _json_length(body, headers)
        subject = "The body is" if end == len(body) else f"The first {end} bytes are"
        body, behind = parsed_json(body[:end], subject), memoryview(body)[end:]
    try:
        check_request(body)
        inputs = binary_inputs(body["inputs"], behind, 0)
    except UnusableTensor as error:
        raise UnusableInput(str(error)) from error
    for tensor in inputs:
        tensor.described["data"] = _values(tensor)
    return body


def to_buffer(values: Any, datatype: str) -> bytes:
    """Return the buffer of a numpy array; values that are no text become the text of their JSON."""
    if datatype == BYTES:
        return write_elements(map(_encoded, values.flatten().tolist()))
    buffer: bytes = values.astype(NUMPY[datatype], copy=False).tobytes()
    return buffer


def _json_length(body: bytes | bytearray, headers: Mapping[str, Any]) -> int:
    fields = {name.lower(): value for name, value in headers.items()}
    if (coding := fields.get("content-encoding", "identity")) != "identity":
        raise UnusableInput(f"The body is compressed ({coding}); send it as it is.")
    length = fields.get(LENGTH_HEADER.lower(), str(len(body)))
    if not _LENGTH.fullmatch(length) or int(length) > len(body):
        raise UnusableInput(f"{LENGTH_HEADER} is {length!r}; the body has {len(body)} bytes.")
    return int(length)


def _values(tensor: BinaryInput) -> Any:
    datatype, shape = tensor.described["datatype"], tensor.described["shape"]
    try:
        return _elements(tensor) if datatype == BYTES else _array(tensor, datatype, shape)
    except (TypeError, ValueError) as error:
        raise UnusableInput(
            f"Input {tensor.described['name']!r}: {len(tensor.buffer)} bytes are no {datatype} "
            f"of shape {shape}: {error}"
        ) from error


def _array(tensor: BinaryInput, datatype: str, shape: list[int]) -> Any:
    if datatype not in DATATYPES:
        raise ValueError("the protocol has no such datatype")
    return flat_array(datatype, tensor.buffer).reshape(shape)


def _elements(tensor: BinaryInput) -> list[str | bytes]:
    elements = list(read_elements(tensor.buffer))
    if not elements:
        raise ValueError("there is no element")
    if tensor.encoding == "base64":
        return [b64encode(element).decode() for element in elements]
    return list(map(text_or_bytes, elements))


def _encoded(element: Any) -> bytes:
    if isinstance(element, bytes):
        return element
    text = element if isinstance(element, str) else json.dumps(element)
    return text.encode()
