"""The length of an input as the server sees it, an estimate of what counts for the handler.

It is the number of bytes of all parts. Of tensors that came as bytes, it is the number of elements
of the largest, which grows with any dimension.
"""

import json
import math
from typing import Any

from marserve.backend.protocol import TENSORS_TYPE, Input, Part
from marserve.backend.tensors.datatypes import BYTES
from marserve.backend.tensors.wire import SIZE
from marserve.frontend.batching.rows import RowInput

# Of the JSON in front of tensors; that of a client's request is shorter.
_MAX_HEAD = 1 << 17
_MAX_DIMENSIONS = 64


def length_of(input_: Input) -> float:
    """Return the length of an input."""
    if type(input_) is RowInput:
        return float(input_.length)
    return float(sum(map(_length_of_part, input_.parts)))


def _length_of_part(part: Part) -> int:
    count = len(part.body)
    if part.content_type == TENSORS_TYPE:
        return min(_largest_tensor(part), count) or count
    return count


def _largest_tensor(part: Part) -> int:
    """Return the elements of the largest tensor, of BYTES its bytes; 0 if there are none."""
    body = part.body if isinstance(part.body, bytes | bytearray) else bytes(part.body)
    try:
        head = json.loads(body[: body.find(b"\n", 0, _MAX_HEAD) + 1])
        return max(map(_elements, head["inputs"]), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0


def _elements(tensor: Any) -> int:
    is_bytes = tensor["datatype"] == BYTES
    lengths = [(tensor.get("parameters") or {}).get(SIZE, 0)] if is_bytes else tensor["shape"]
    # A client may send a part of this type itself, with any JSON.
    if len(lengths) > _MAX_DIMENSIONS or any(type(length) is not int for length in lengths):
        return 0
    count: int = math.prod(lengths)
    return max(0, count)
