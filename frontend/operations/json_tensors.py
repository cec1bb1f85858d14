"""Requests and answers of the Open Inference Protocol in JSON, for models whose tensors are cut.

Tensors are cut and joined as bytes. Python's JSON parser and writer cannot be interrupted, so the
lists of numbers of a large request are found by their ends (`json_items`) and parsed in pieces.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from marserve.backend.json_text import KEEP, NotJson
from marserve.backend.protocol import Buffer, Prediction
from marserve.backend.tensors.answers import json_numbers
from marserve.backend.tensors.checks import check_request
from marserve.backend.tensors.datatypes import (
    BYTES,
    ITEM_BYTES,
    UnusableTensor,
    flattened,
    nested_shape,
    read_elements,
    write_elements,
    write_numbers,
)
from marserve.backend.tensors.rows import Output
from marserve.backend.tensors.wire import LENGTH_HEADER, SIZE, WantedOutputs
from marserve.frontend.aio.json_items import (
    SMALL_BYTES,
    UNREADABLE,
    Text,
    each_run,
    find_member,
    items_at,
    number_lists,
)
from marserve.frontend.aio.long_work import Steps, joined
from marserve.frontend.errors import BadRequest, PredictionFailed
from marserve.frontend.operations.open_inference_answers import InferAnswer

Json = dict[str, Any]

_VALUES = 4096  # that are written in one step
_MAX_NAME = 80
_DATA = "data"
_BRACKETS = bytes.maketrans(b"[]", b"  ")
_JSON = "application/json"


class _Values(NamedTuple):
    """The values of an input that are still text: a list between two positions."""

    text: Text
    start: int
    stop: int


def read_document(body: Text) -> Steps[Json | None]:
    """Return the JSON of a request; None if it is not an object with a list of inputs.

    Raises BadRequest if the inputs are unusable.
    """
    try:
        head = json.loads(body) if len(body) <= SMALL_BYTES else (yield from _taken_apart(body))
    except UNREADABLE:
        return None
    if not isinstance(head, dict) or not isinstance(head.get("inputs"), list):
        return None
    try:
        check_request(head)
    except UnusableTensor as error:
        raise BadRequest(str(error)) from error
    return head


def as_bytes(tensor: Json) -> Steps[Buffer]:
    """Remove the values of an input from its JSON, and return them, or raise BadRequest."""
    if _DATA not in tensor:
        raise BadRequest(f"Input {tensor['name'][:_MAX_NAME]!r} has no data.")
    values = tensor.pop(_DATA)
    try:
        if isinstance(values, _Values):
            read = _read_elements if tensor["datatype"] == BYTES else _read_numbers
            return (yield from read(tensor["datatype"], values))
        shape = nested_shape(values)
        return _written(tensor["datatype"], flattened(values, shape))
    except UnusableTensor as error:
        raise BadRequest(f"Input {tensor['name'][:_MAX_NAME]!r} {error}.") from error
    except UNREADABLE as error:
        raise BadRequest(f"Input {tensor['name'][:_MAX_NAME]!r}: {error}.") from error


def _taken_apart(body: Text) -> Steps[Any]:
    """Return the JSON of a large request, in which the values of its inputs are still text."""
    at = _begin_of(body, 0, b"{")
    (start, stop), _ = yield from find_member(body, at, "inputs")
    spans, _ = yield from items_at(body, _begin_of(body, start, b"["), SMALL_BYTES)
    pieces: list[Buffer] = [body[:start], b"["]
    values: list[_Values | None] = []
    for begin, end in spans:
        (first, last), _ = yield from find_member(body, _begin_of(body, begin, b"{"), _DATA)
        has_data = first > begin
        values.append(_Values(body, first, last) if has_data else None)
        rest = (body[begin:first], b"null", body[last:end]) if has_data else (body[begin:end],)
        pieces += (b",", *rest) if len(values) > 1 else rest
    text = yield from joined([*pieces, b"]", body[stop:]])
    if len(text) > SMALL_BYTES:
        raise BadRequest(
            f"Beside the data of tensors a request may have {SMALL_BYTES} bytes of JSON; this has "
            f"{len(text)}."
        )
    head = json.loads(text)
    for tensor, found in zip(head["inputs"], values, strict=True):
        if found is not None:
            tensor[_DATA] = found
    return head


def _begin_of(text: Text, at: int, bracket: bytes) -> int:
    some = text[at : at + SMALL_BYTES]
    at += len(some) - len(some.lstrip())
    if not text.startswith(bracket, at):
        raise ValueError(f"{bracket.decode()} is missing")
    return at


def _read_elements(datatype: str, values: _Values) -> Steps[Buffer]:
    text, pieces = values.text, list[Buffer]()

    def add(start: int, stop: int) -> None:
        found = json.loads(b"[" + text[start:stop] + b"]")
        pieces.append(_written(datatype, flattened(found, nested_shape(found))))

    yield from each_run(text, _begin_of(text, values.start, b"["), add)
    yield sum(map(len, pieces))
    return (yield from joined(pieces))


def _read_numbers(datatype: str, values: _Values) -> Steps[Buffer]:
    """Return the bytes of numbers between commas, which may have brackets between them."""
    pieces = []
    for numbers in number_lists(*values, _BRACKETS):
        pieces.append(_written(datatype, numbers))
        yield len(pieces[-1])
    return (yield from joined(pieces))


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

    def __init__(self, head: Json, members: Mapping[str, str], json_nan: str = KEEP) -> None:
        self._members = members
        self._json_nan = json_nan
        self._wanted = WantedOutputs.of(head)

    def write(self, answer: InferAnswer) -> Steps[Prediction]:
        """Write an answer; PredictionFailed if it has bytes that are not text."""
        head, buffers = [b""], []  # the members are first
        for output in answer.outputs:
            entry: Json = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
            parameters = dict(output.parameters)
            if is_binary := self._wanted.is_bytes(output.name):
                parameters[SIZE] = len(output.buffer)
                buffers.append(output.buffer)
            text = json.dumps(entry | ({"parameters": parameters} if parameters else {})).encode()
            head.append(b", " if len(head) > 1 else b"")
            head.append(text if is_binary else text[:-1] + b', "data": [')
            if not is_binary:
                yield from _write_values(output, head, self._json_nan)
                head.append(b"]}")
        members = {name: getattr(answer, name) or value for name, value in self._members.items()}
        if answer.parameters:
            members["parameters"] = answer.parameters
        head[0] = f'{json.dumps(members)[:-1]}, "outputs": ['.encode()
        head.append(b"]}\n")
        body = yield from joined([*head, *buffers])
        kind = "application/octet-stream" if buffers else _JSON
        size = str(sum(map(len, head)))
        return Prediction(body, headers={LENGTH_HEADER: size, "content-type": kind})


def _write_values(output: Output, head: list[bytes], json_nan: str) -> Steps[None]:
    """Append the values of an output as JSON, between commas, to the pieces of a head."""
    if output.datatype == BYTES:
        for number, element in enumerate(read_elements(output.buffer)):
            try:
                text = json.dumps(element.decode())
            except UnicodeDecodeError as error:
                raise PredictionFailed(
                    f"Output {output.name!r} has an element that is not text; request it as binary "
                    "data.",
                    status=503,
                ) from error
            head.append(f", {text}".encode() if number else text.encode())
            yield len(text)
        return
    view, size = memoryview(output.buffer), ITEM_BYTES[output.datatype] * _VALUES
    for start in range(0, len(view), size):
        piece = replace(output, buffer=view[start : start + size])
        try:
            numbers = json.dumps(json_numbers(piece, json_nan))
        except NotJson as error:
            raise PredictionFailed(str(error), status=500) from error
        head.append(f", {numbers[1:-1]}".encode() if start else numbers[1:-1].encode())
        yield len(head[-1])
