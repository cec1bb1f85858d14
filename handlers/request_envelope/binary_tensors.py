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

from marserve.backend.protocol import Buffer
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
    ENCODING,
    LENGTH_HEADER,
    SIZE,
    WantedOutputs,
    buffers_behind,
)
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.request_envelope.instances import parsed_json

_LENGTH = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class TensorRequest:
    """What the answer to a request depends on.

    Attributes:
        id: The id that the client chose.
        inputs: The names of the inputs.
        wanted: The outputs that it asks for.
    """

    id: Any = None
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
        """Return the outputs asked for: name, result, and whether it is sent as bytes.

        Raises:
            IndexError: No outputs are asked for, and there are more results than inputs.
        """
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


def read_request(body: bytes, headers: Mapping[str, Any]) -> Any:
    """Parse the body of a request, and put the tensors behind its JSON into it.

    Without a `LENGTH_HEADER`, in any spelling, all of the body is JSON.

    Raises:
        UnusableInput: The body is not in the format, or compressed.
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
        raise UnusableInput(f"The first {end} bytes are not JSON: {error}") from error
    return with_tensors(document, body, end)


def with_tensors(document: Any, body: bytes = b"", end: int = 0) -> Any:
    """Put the tensors behind the JSON of a body, which ends at ``end``, into the request.

    Raises:
        UnusableInput: The request is not in the format, or the bytes do not fit the tensors.
    """
    try:
        check_request(document)
        buffers = buffers_behind(document["inputs"], body, end)
    except UnusableTensor as error:
        raise UnusableInput(str(error)) from error
    inputs = zip(document["inputs"], buffers, strict=True)
    return {**document, "inputs": [_with_data(tensor, buffer) for tensor, buffer in inputs]}


def to_buffer(values: Any, datatype: str) -> bytes:
    """Return the buffer of a numpy array; values that are no text become the text of their JSON."""
    if datatype == BYTES:
        return write_elements(map(_encoded, values.flatten().tolist()))
    buffer: bytes = values.astype(NUMPY[datatype], copy=False).tobytes()
    return buffer


def _with_data(tensor: Any, buffer: Buffer | None) -> Any:
    if buffer is None:
        return tensor
    parameters = {**tensor["parameters"]}
    del parameters[SIZE]
    encoding = parameters.pop(ENCODING, "")
    filled = {key: value for key, value in tensor.items() if key != "parameters"}
    try:
        filled["data"] = _values(buffer, tensor, encoding)
    except (TypeError, ValueError) as error:
        raise UnusableInput(
            f"Input {tensor['name']!r}: {len(buffer)} bytes are no {tensor['datatype']} "
            f"of shape {tensor['shape']}: {error}"
        ) from error
    return {**filled, "parameters": parameters} if parameters else filled


def _values(buffer: Buffer, tensor: Any, encoding: str) -> Any:
    datatype = tensor["datatype"]
    if datatype not in DATATYPES:
        raise ValueError("the protocol has no such datatype")
    if datatype != BYTES:
        return flat_array(datatype, buffer).reshape(tensor["shape"])
    elements = list(read_elements(buffer))
    if not elements:
        raise ValueError("there is no element")
    if encoding == "base64":
        return [b64encode(element).decode() for element in elements]
    return list(map(text_or_bytes, elements))


def _encoded(element: Any) -> bytes:
    if isinstance(element, bytes):
        return element
    text = element if isinstance(element, str) else json.dumps(element)
    return text.encode()
