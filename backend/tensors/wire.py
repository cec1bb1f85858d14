"""The binary extension of the Open Inference Protocol: tensors as bytes behind the JSON.

The JSON ends where the header `LENGTH_HEADER` says; the buffers of the tensors whose parameters
contain `SIZE` follow, in order and without gaps.

Between frontend and worker a request is a part of type `TENSORS_TYPE`: one line of JSON, which ends
with the line, and the buffers. The frontend has checked it.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marserve.backend.protocol import Buffer
from marserve.backend.tensors.datatypes import UnusableTensor

#: The number of bytes of the JSON in a body.
LENGTH_HEADER = "Inference-Header-Content-Length"
#: Parameter of a tensor: the number of its bytes behind the JSON.
SIZE = "binary_data_size"
#: Parameter of a tensor of BYTES: ``base64`` if the handler gets its elements so, as TorchServe's
#: gRPC clients send them.
ENCODING = "binary_data_encoding"
#: Member of a request to a handler that takes arrays of numpy instead of lists.
ARRAYS = "arrays"
#: Header from the frontend for the answer, as JSON: ``id``, ``model_name``, ``model_version``, and
#: the request's ``outputs`` and ``parameters``, or that they are `IN_BODY`.
FORMAT_HEADER = "ts_tensor_format"
IN_BODY = "in_body"

Json = dict[str, Any]

#: What reading a request as a part raises if it is none: a client may send a body of this type.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error)

_ALIGNMENT = 64
_MAX_NAME = 80  # in a message
_MAX_NUMBER = 20


@dataclass(frozen=True)
class WantedOutputs:
    """The outputs that a request asks for.

    Attributes:
        names: Each name, and whether it is sent as bytes; empty for all outputs.
        is_binary: Whether outputs that are not named are sent as bytes.
    """

    names: Mapping[str, bool] = field(default_factory=dict)
    is_binary: bool = False

    @classmethod
    def of(cls, head: Json) -> "WantedOutputs":
        """Read them from a request that `checks.check_request` accepts."""
        is_binary = _flag(head, "binary_data_output", default=False)
        names = {
            output["name"]: _flag(output, "binary_data", default=is_binary)
            for output in head.get("outputs") or ()
        }
        return cls(names, is_binary)

    def is_bytes(self, name: str) -> bool:
        """Whether an output is sent as bytes."""
        return self.names.get(name, self.is_binary)


def _flag(members: Json, name: str, *, default: bool) -> bool:
    return bool((members.get("parameters") or {}).get(name, default))


def buffers_behind(inputs: Sequence[Json], body: Buffer, at: int) -> list[memoryview | None]:
    """Return the bytes of each input in a body; None for an input whose data is in the JSON.

    `checks.check_request` has accepted the inputs; ``at`` is where the JSON ends. Raises
    UnusableTensor.
    """
    view = memoryview(body)
    buffers: list[memoryview | None] = []
    for tensor in inputs:
        size = (tensor.get("parameters") or {}).get(SIZE)
        if size is None:
            buffers.append(None)
            continue
        if type(size) is not int or not 0 <= size <= len(view) - at:
            raise UnusableTensor(
                f"Input {tensor['name'][:_MAX_NAME]!r}: {SIZE} is {str(size)[:_MAX_NUMBER]}; "
                f"there are {len(view) - at} bytes."
            )
        buffers.append(view[at : at + size])
        at += size
    if at < len(view):
        raise UnusableTensor(f"The body has {len(view) - at} bytes more than its inputs.")
    return buffers


def pack_request(head: Json, buffers: Sequence[Buffer | None]) -> list[Buffer]:
    """Return the pieces of a body: a line of JSON, padded to align arrays, and the buffers."""
    text = json.dumps(head).encode()
    text += b" " * (-(len(text) + 1) % _ALIGNMENT) + b"\n"
    return [text, *(buffer for buffer in buffers if buffer is not None)]


@dataclass(frozen=True)
class BinaryInput:
    """An input whose values are bytes: its JSON without them, and the parameter `ENCODING`."""

    described: Json
    buffer: memoryview
    encoding: str


def binary_inputs(inputs: Sequence[Json], body: Buffer, at: int) -> list[BinaryInput]:
    """Return the inputs whose values are bytes, as by `buffers_behind`, without its parameters."""
    found = []
    for tensor, buffer in zip(inputs, buffers_behind(inputs, body, at), strict=True):
        if buffer is None:
            continue
        parameters = tensor["parameters"]
        del parameters[SIZE]
        encoding = parameters.pop(ENCODING, "")
        if not parameters:
            del tensor["parameters"]
        found.append(BinaryInput(tensor, buffer, encoding))
    return found


def unpack_request(body: Buffer) -> tuple[Json, list[BinaryInput]]:
    """Return the JSON of a request by `pack_request`, and its inputs that are bytes."""
    body = body if isinstance(body, bytes | bytearray) else bytes(body)
    at = body.index(b"\n") + 1
    head: Json = json.loads(bytes(body[:at]))
    return head, binary_inputs(head["inputs"], body, at)
