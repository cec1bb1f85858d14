"""The Open Inference Protocol's binary extension: tensors as raw bytes behind the JSON.

The header `LENGTH_HEADER` tells how many bytes the JSON has. Behind it lie, in order and without
gaps, the buffers of those tensors whose parameters hold ``binary_data_size``: numbers little-endian
and row by row, the elements of BYTES each behind its own length in four bytes. Where the parameter
``binary_data_encoding`` is ``base64``, the handler gets elements of BYTES so: the server asks for
that where TorchServe did it.

What comes in is made to look as if it had come as JSON, which knows texts only: an element of BYTES
is a str where it is text in UTF-8, and bytes where it is what JSON could not have carried.
"""

import io
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from marserve.backend.tensor_checks import check_request
from marserve.backend.tensor_requests import ENCODING, LENGTH_HEADER, SIZE
from marserve.backend.tensors import NUMPY, UnusableTensor
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.request_envelope.instances import parsed_json

_LENGTH = re.compile("[0-9]{1,18}")
_PREFIX_BYTES = 4
#: The protocol's datatypes of numbers, as numpy names them.
DTYPES = NUMPY


@dataclass(frozen=True)
class TensorRequest:
    """What the answer to a request depends on."""

    id: Any = None  # the one it gave itself
    inputs: list[str] = field(default_factory=list)  # their names
    outputs: dict[str, bool] = field(default_factory=dict)  # names asked for, to whether as bytes
    is_binary: bool = False  # whether outputs that it does not name go as bytes

    @classmethod
    def of(cls, body: dict[str, Any]) -> "TensorRequest":
        """Read the JSON of a request."""
        id_ = body.get("id")
        is_binary = bool((body.get("parameters") or {}).get("binary_data_output"))
        return cls(
            id=id_ if id_ is not None and str(id_).strip() else None,
            inputs=[tensor["name"] for tensor in body["inputs"]],
            outputs={
                tensor["name"]: bool((tensor.get("parameters") or {}).get("binary_data", is_binary))
                for tensor in body.get("outputs") or ()
            },
            is_binary=is_binary,
        )

    def outputs_of(self, results: Any) -> list[tuple[str, Any, bool]]:
        """Give each result that was asked for its name, and say whether it goes as bytes.

        Raises:
            IndexError: No outputs are asked for, and there are more results than inputs.
        """
        if not self.outputs:
            return [(self.inputs[i], result, self.is_binary) for i, result in enumerate(results)]
        names = list(self.outputs)
        if self.outputs.keys() <= set(self.inputs):
            names = self.inputs
        by_name = dict(zip(names, results, strict=False))
        return [(name, by_name[name], raw) for name, raw in self.outputs.items() if name in by_name]


def read_request(body: bytes, headers: Mapping[str, Any]) -> Any:
    """Parse the body of a request, and put the tensors behind its JSON into it.

    Without a `LENGTH_HEADER`, in any spelling, all of the body is JSON.

    Raises:
        UnusableInput: It is not in the format; or it is compressed, which the server leaves to
            others as TorchServe does.
    """
    fields = {name.lower(): value for name, value in headers.items()}
    if (coding := fields.get("content-encoding", "identity")) != "identity":
        raise UnusableInput(f"The body is compressed ({coding}); send it as it is.")
    length = fields.get(LENGTH_HEADER.lower())
    if length is None:
        return with_tensors(parsed_json(body))
    if not _LENGTH.fullmatch(length) or int(length) > len(body):
        raise UnusableInput(f"{LENGTH_HEADER} is {length!r}; the body has {len(body)} bytes.")
    end = int(length)
    try:
        document = json.loads(body[:end])
    except (ValueError, RecursionError) as error:
        raise UnusableInput(f"There is no JSON in the first {end} bytes: {error}") from error
    return with_tensors(document, body[end:])


def with_tensors(document: Any, buffers: bytes = b"") -> Any:
    """Put the tensors that came as bytes into a request.

    Raises:
        UnusableInput: The request is not in the format, or the buffers do not fit the tensors.
    """
    try:
        check_request(document)
    except UnusableTensor as error:
        raise UnusableInput(str(error)) from error
    unread = io.BytesIO(buffers)
    inputs = [_with_data(tensor, unread) for tensor in document["inputs"]]
    if extra := unread.read():
        raise UnusableInput(f"The body has {len(extra)} bytes more than its inputs.")
    return {**document, "inputs": inputs}


def to_buffer(values: Any, datatype: str) -> bytes:
    """Make the buffer of a numpy array; what is neither text nor number becomes its JSON's text."""
    if datatype == "BYTES":
        elements = map(_encoded, values.flatten().tolist())
        return b"".join(len(text).to_bytes(_PREFIX_BYTES, "little") + text for text in elements)
    buffer: bytes = values.astype(DTYPES[datatype], copy=False).tobytes()
    return buffer


def _with_data(tensor: Any, unread: BinaryIO) -> Any:
    """Take the data of an input from the buffers, unless the JSON holds it."""
    parameters = dict(tensor.get("parameters") or ())
    if SIZE not in parameters:
        return tensor
    size, encoding = parameters.pop(SIZE), parameters.pop(ENCODING, "")
    if type(size) is not int or size < 0:
        raise UnusableInput(f"Input {tensor['name']!r}: {SIZE} is {size!r}, which is no length.")
    buffer = unread.read(size)
    if len(buffer) < size:
        raise UnusableInput(f"Input {tensor['name']!r}: of {size} bytes there are {len(buffer)}.")
    filled = {key: value for key, value in tensor.items() if key != "parameters"}
    filled["data"] = _from_buffer(buffer, tensor)
    if encoding == "base64" and tensor["datatype"] == "BYTES":
        filled["data"] = [b64encode(_encoded(element)).decode() for element in filled["data"]]
    return {**filled, "parameters": parameters} if parameters else filled


def _from_buffer(buffer: bytes, tensor: Any) -> Any:
    datatype = tensor["datatype"]
    try:
        return _elements(buffer) if datatype == "BYTES" else _numbers(buffer, tensor)
    except (TypeError, ValueError) as error:
        raise UnusableInput(
            f"Input {tensor['name']!r}: {len(buffer)} bytes are no {datatype} "
            f"of shape {tensor['shape']}: {error}"
        ) from error


def _numbers(buffer: bytes, tensor: Any) -> Any:
    if tensor["datatype"] == "BF16":  # the upper half of an FP32, a type that numpy has not
        values = (np.frombuffer(buffer, "<u2").astype("<u4") << 16).view("<f4")
    elif tensor["datatype"] in DTYPES:
        values = np.frombuffer(buffer, DTYPES[tensor["datatype"]])
    else:
        raise ValueError("the protocol has no such datatype")
    return values.reshape(tensor["shape"])


def _elements(buffer: bytes) -> list[str | bytes]:
    unread = io.BytesIO(buffer)
    elements: list[str | bytes] = []
    while prefix := unread.read(_PREFIX_BYTES):
        size = int.from_bytes(prefix, "little")
        element = unread.read(size)
        if len(prefix) < _PREFIX_BYTES or len(element) < size:
            raise ValueError(f"element {len(elements)} is cut short")
        elements.append(_decoded(element))
    if not elements:
        raise ValueError("there is no element")
    return elements


def _decoded(element: bytes) -> str | bytes:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return element


def _encoded(element: Any) -> bytes:
    if isinstance(element, bytes):
        return element
    text = element if isinstance(element, str) else json.dumps(element)
    return text.encode()
