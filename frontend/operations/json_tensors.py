"""Requests and answers of the Open Inference Protocol in JSON, for models whose tensors are cut.

Tensors are cut and joined as bytes. Python's JSON parser and writer cannot be interrupted, so the
lists of numbers of a large request are found by their ends (`json_items`) and parsed in pieces.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from marserve.backend.protocol import Prediction
from marserve.backend.tensors.checks import check_request
from marserve.backend.tensors.datatypes import (
    BYTES,
    ITEM_BYTES,
    UnusableTensor,
    flattened,
    nested_shape,
    read_elements,
    read_numbers,
    write_elements,
    write_numbers,
)
from marserve.backend.tensors.rows import Output
from marserve.backend.tensors.wire import LENGTH_HEADER, SIZE, WantedOutputs
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.errors import BadRequest, PredictionFailed
from marserve.frontend.operations.json_items import UNREADABLE, find_member, items_at
from marserve.frontend.operations.open_inference_answers import InferAnswer

Json = dict[str, Any]

_SMALL = 1 << 16  # bytes of JSON that are parsed in one step
_VALUES = 4096  # that are written in one step
_MAX_NAME = 80
_DATA = "data"
_BRACKETS = bytes.maketrans(b"[]", b"  ")
_COMMA = re.compile(rb"[ \t\n\r]*,[ \t\n\r]*")


def read_document(body: bytes) -> Steps[Json | None]:
    """Return the JSON of a request; None if it is not an object with a list of inputs.

    Raises BadRequest if the inputs are unusable.
    """
    try:
        head = json.loads(body) if len(body) <= _SMALL else (yield from _taken_apart(body))
    except UNREADABLE:
        return None
    if not isinstance(head, dict) or not isinstance(head.get("inputs"), list):
        return None
    try:
        check_request(head)
    except UnusableTensor as error:
        raise BadRequest(str(error)) from error
    return head


def as_bytes(tensor: Json) -> Steps[bytes]:
    """Remove the values of an input from its JSON, and return them, or raise BadRequest."""
    if _DATA not in tensor:
        raise BadRequest(f"Input {tensor['name'][:_MAX_NAME]!r} has no data.")
    values = tensor.pop(_DATA)
    try:
        if isinstance(values, bytes):  # of `_taken_apart`
            return (yield from _read_text(tensor["datatype"], values))
        shape = nested_shape(values)
        return _written(tensor["datatype"], flattened(values, shape))
    except UnusableTensor as error:
        raise BadRequest(f"Input {tensor['name'][:_MAX_NAME]!r} {error}.") from error
    except UNREADABLE as error:
        raise BadRequest(f"Input {tensor['name'][:_MAX_NAME]!r}: {error}.") from error


def _taken_apart(body: bytes) -> Steps[Any]:
    """Return the JSON of a large request, in which the values of its inputs are still text."""
    start, stop, _ = yield from find_member(body, _begin_of(body, b"{"), "inputs")
    described, values = [], []
    for text in (yield from items_at(body[start:stop], _begin_of(body[start:stop], b"[")))[0]:
        begin, end, _ = yield from find_member(text, _begin_of(text, b"{"), _DATA)
        values.append(text[begin:end] if begin else None)
        described.append(b"%bnull%b" % (text[:begin], text[end:]) if begin else text)
    text = b"%b[%b]%b" % (body[:start], b",".join(described), body[stop:])
    if len(text) > _SMALL:
        raise BadRequest(
            f"Beside the data of tensors a request may have {_SMALL} bytes of JSON; this has "
            f"{len(text)}."
        )
    head = json.loads(text)
    for tensor, found in zip(head["inputs"], values, strict=True):
        if found is not None:
            tensor[_DATA] = found
    return head


def _begin_of(text: bytes, bracket: bytes) -> int:
    at = len(text) - len(text.lstrip())
    if not text.startswith(bracket, at):
        raise ValueError(f"{bracket.decode()} is missing")
    return at


def _read_text(datatype: str, text: bytes) -> Steps[bytes]:
    if datatype != BYTES:
        return (yield from _read_numbers(datatype, text.translate(_BRACKETS)))
    pieces = []
    for item in (yield from items_at(text, _begin_of(text, b"[")))[0]:
        value = json.loads(item)
        pieces.append(_written(datatype, flattened(value, nested_shape(value))))
        yield
    return b"".join(pieces)


def _read_numbers(datatype: str, text: bytes) -> Steps[bytes]:
    """Return the bytes of numbers between commas, whose brackets are removed."""
    pieces, at = [], 0
    while at < len(text):
        found = _COMMA.search(text, at + _SMALL)
        end = found.start() if found else len(text)
        pieces.append(_written(datatype, json.loads(b"[%b]" % text[at:end])))
        at = found.end() if found else end
        yield
    return b"".join(pieces)


def _written(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == BYTES:
        if not all(isinstance(value, str) for value in values):
            raise UnusableTensor("has an element that is not text")
        return write_elements(value.encode("utf-8", "surrogatepass") for value in values)
    if datatype not in ITEM_BYTES:
        return b""  # the check of the datatype refuses it
    return write_numbers(datatype, values)


class AnswerBody:
    """Writes the answer to a request over HTTP.

    ``members`` are the defaults of the answer's members id, model_name and model_version.
    """

    def __init__(self, head: Json, members: Mapping[str, str]) -> None:
        self._members = members
        self._wanted = WantedOutputs.of(head)

    def write(self, answer: InferAnswer) -> Steps[Prediction]:
        """Write an answer; PredictionFailed if it has bytes that are not text."""
        described, buffers = [], []
        for output in answer.outputs:
            entry: Json = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
            parameters = dict(output.parameters)
            if is_binary := self._wanted.is_bytes(output.name):
                parameters[SIZE] = len(output.buffer)
                buffers.append(output.buffer)
            text = json.dumps(entry | ({"parameters": parameters} if parameters else {}))
            if not is_binary:
                data = yield from _values_in_json(output)
                text = f'{text[:-1]}, "data": [{data}]}}'
            described.append(text)
        members = {name: getattr(answer, name) or value for name, value in self._members.items()}
        if answer.parameters:
            members["parameters"] = answer.parameters
        outputs = ", ".join(described)
        head = f'{json.dumps(members)[:-1]}, "outputs": [{outputs}]}}\n'.encode()
        body = b"".join([head, *buffers])
        kind = "application/octet-stream" if buffers else "application/json"
        return Prediction(body, headers={LENGTH_HEADER: str(len(head)), "content-type": kind})


def _values_in_json(output: Output) -> Steps[str]:
    pieces: list[str] = []
    if output.datatype == BYTES:
        some: list[str] = []
        for element in read_elements(output.buffer):
            try:
                some.append(json.dumps(element.decode()))
            except UnicodeDecodeError as error:
                raise PredictionFailed(
                    f"Output {output.name!r} has an element that is not text; request it as binary "
                    "data.",
                    status=503,
                ) from error
            if len(some) % _VALUES == 0:
                yield
        return ", ".join(some)
    view, size = memoryview(output.buffer), ITEM_BYTES[output.datatype] * _VALUES
    for start in range(0, len(view), size):
        numbers = read_numbers(output.datatype, view[start : start + size])
        pieces.append(json.dumps(numbers)[1:-1])
        yield
    return ", ".join(pieces)
