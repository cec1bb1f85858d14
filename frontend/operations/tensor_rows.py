"""Cuts requests with tensors into rows, and joins the answers to the rows.

For models with ``dynamicBatchSize``. An input of shape [7, 2] is seven rows of shape [1, 2], each a
job. ``batchDim`` is the dimension of inputs and outputs that counts the rows. Along the first
dimension, rows are views of the received bytes. Along another one the bytes are first brought into
the order of the rows, and those of the outputs back.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal

from marserve.backend.protocol import TENSORS_TYPE, Buffer, Input, Part, Prediction
from marserve.backend.tensors.datatypes import (
    BYTES,
    ITEM_BYTES,
    UnusableTensor,
    element_bytes,
    read_elements,
    write_elements,
)
from marserve.backend.tensors.rows import OutputJoiner
from marserve.backend.tensors.wire import SIZE, pack_request
from marserve.frontend.aio.long_work import Steps, joined
from marserve.frontend.batching.rows import REST_OF_BLOCK, RowInput
from marserve.frontend.errors import BadRequest, PredictionFailed
from marserve.frontend.operations.client_lists import ROW_BYTES, failed_item
from marserve.frontend.operations.json_tensors import AnswerBody
from marserve.frontend.operations.open_inference_answers import InferAnswer, answer_of

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_BODY = "body"
_MAX_NAME = 80
_ELEMENTS = 4096  # of BYTES that are read in one step
_ELEMENT_BYTES = 64  # of an element in a list, at least
_MOVES = 256  # slices that are copied in one step
_UNITS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def _unjoinable(why: str) -> PredictionFailed:
    text = f"The handler's answers to the rows cannot be joined: {why}."
    return PredictionFailed(text, status=503)


def row_count(inputs: Sequence[Json], dim: int) -> int:
    """Return the number of rows of inputs; BadRequest if they differ, or there are none."""
    counts = {}
    for tensor in inputs:
        name, shape = tensor["name"][:_MAX_NAME], tensor["shape"]
        if len(shape) <= dim:
            raise BadRequest(
                f"Input {name!r} has the shape {shape}, and no dimension {dim}, which counts the "
                "rows of the batch."
            )
        counts[name] = shape[dim]
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise BadRequest(f"All inputs need as many rows along dimension {dim}; there are {listed}.")
    count: int = next(iter(counts.values()))
    if not count:
        raise BadRequest(f"The inputs have no rows: their dimension {dim} has the length 0.")
    return count


@dataclass(frozen=True)
class Column:
    """An input of a request, its bytes in the order of the rows."""

    described: Json
    buffer: memoryview
    elements: int  # of a row; 0 for BYTES, whose lengths vary
    row_bytes: int  # if all rows have as many
    ends: Sequence[int] = ()  # where each row ends, if they have not

    def rows(self, first: int, count: int) -> memoryview:
        """Return the bytes of some rows."""
        if not self.ends:
            return self.buffer[first * self.row_bytes : (first + count) * self.row_bytes]
        return self.buffer[self.ends[first - 1] if first else 0 : self.ends[first + count - 1]]


@dataclass(frozen=True)
class _Source:
    """The inputs of a request; ``head`` is its JSON for the worker, without them."""

    id: str
    headers: dict[str, str]
    head: Json
    columns: Sequence[Column]
    dim: int  # that counts the rows

    def block(self, first: int, count: int) -> Input:
        """Return the input of successive rows, as a worker gets it."""
        inputs, buffers = [], []
        for column in self.columns:
            buffer, described = column.rows(first, count), column.described
            shape = described["shape"].copy()
            shape[self.dim] = count
            parameters = {**described.get("parameters", {}), SIZE: len(buffer)}
            inputs.append({**described, "shape": shape, "parameters": parameters})
            buffers.append(buffer)
        body = b"".join(pack_request({**self.head, "inputs": inputs}, buffers))
        return Input(f"{self.id}.{first}", self.headers, [Part(_BODY, TENSORS_TYPE, body)])


class TensorRows:
    """The rows of a request, whose JSON for the worker is ``head``, without its inputs.

    ``dims`` count the rows, of inputs and of outputs. ``form`` writes the answer over HTTP.
    """

    def __init__(
        self,
        id_: str,
        headers: dict[str, str],
        head: Json,
        columns: Sequence[Column],
        count: int,
        dims: tuple[int, int],
        form: AnswerBody,
    ) -> None:
        self._id, self._dim = id_, dims[1]
        self._source = _Source(id_, headers, head, columns, dims[0])
        self._count = count
        self._form = form
        self.rows: list[RowInput] = []

    def cut(self, max_rows: int) -> Steps[None]:
        """Make the rows, at most ``max_rows``."""
        # They do not refer to this object: a cycle would keep the request in memory.
        source = self._source
        for place in range(min(self._count, max_rows)):
            columns = [(each, each.rows(place, 1)) for each in source.columns]
            parts = [Part(each.described["name"], "", row) for each, row in columns]
            length = max(each.elements or len(row) for each, row in columns)
            id_ = f"{self._id}.{place}"
            self.rows.append(RowInput(id_, source.headers, parts, source, place, length))
            yield ROW_BYTES

    def join(self, predictions: Sequence[Prediction]) -> Steps[Prediction]:
        """Return the answer over HTTP; that of a row that failed, if one did."""
        if predictions[-1].status != 200:
            return failed_item(predictions)
        answer = yield from self.joined(predictions)
        return (yield from self._form.write(answer))

    def joined(self, predictions: Sequence[Prediction]) -> Steps[InferAnswer]:
        """Return one answer; PredictionFailed if a row failed, or they cannot be joined."""
        if (status := predictions[-1].status) != 200:
            answer_of(predictions[-1])  # raises the handler's error, if it is one
            number = len(predictions) - 1
            raise _unjoinable(f"row {number} was answered with status {status}")
        dim = self._dim
        joiner, whole = OutputJoiner(dim), InferAnswer()
        for prediction, count in _blocks(predictions):
            answer = answer_of(prediction)
            if prediction is predictions[0]:
                whole = answer
            try:
                joiner.add(answer.outputs, count)
            except UnusableTensor as error:
                logger.warning("%s: %s", self._id, error)
                raise _unjoinable(str(error)) from error
            yield 0
        whole.outputs = []
        for output, buffers in joiner.pieces():
            yield sum(map(len, buffers))
            output.buffer = yield from joined(buffers)
            whole.outputs.append(output)
            if not dim:
                continue
            outer, inner = prod(output.shape[:dim]), prod(output.shape[dim + 1 :])
            moving = swapped(output.buffer, output.datatype, self._count, outer, inner)
            output.buffer = yield from moving
        return whole


def columns_of(
    inputs: Sequence[Json], buffers: Sequence[Buffer], count: int, dim: int, max_rows: int
) -> Steps[list[Column]]:
    """Return the inputs of a request, whose bytes have been checked; ``max_rows`` are used."""
    columns = []
    for tensor, buffer in zip(inputs, buffers, strict=True):
        shape, datatype = tensor["shape"], tensor["datatype"]
        outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
        if dim:
            buffer = yield from swapped(buffer, datatype, outer, count, inner)
        ends: Sequence[int] = ()
        if datatype == BYTES and outer * inner:
            ends = yield from _row_ends(buffer, outer * inner, max_rows)
        elements = 0 if datatype == BYTES else outer * inner
        columns.append(Column(tensor, memoryview(buffer), elements, len(buffer) // count, ends))
    return columns


def swapped(buffer: Buffer, datatype: str, first: int, second: int, inner: int) -> Steps[Buffer]:
    """Return the bytes of a tensor of shape [first, second, inner] as of [second, first, inner]."""
    if min(first, second) == 1 or not inner:
        return buffer
    if datatype == BYTES:
        return (yield from _swapped_elements(buffer, first, second, inner))
    code = _UNITS[ITEM_BYTES[datatype]]
    written = bytearray(len(buffer))
    yield len(buffer)
    source, target = memoryview(buffer).cast("B").cast(code), memoryview(written).cast(code)
    yield from _swap(source, target, first, second, inner)
    return written


def _swapped_elements(buffer: Buffer, first: int, second: int, inner: int) -> Steps[Buffer]:
    elements: list[bytes] = []
    for element in read_elements(buffer):
        elements.append(element)
        if len(elements) % _ELEMENTS == 0:
            yield _ELEMENTS * _ELEMENT_BYTES
    moved = [b""] * len(elements)
    yield from _swap(elements, moved, first, second, inner)
    pieces = []
    for start in range(0, len(moved), _ELEMENTS):
        pieces.append(write_elements(moved[start : start + _ELEMENTS]))
        yield len(pieces[-1])
    return (yield from joined(pieces))


def _swap(source: Any, target: Any, first: int, second: int, inner: int) -> Steps[None]:
    for moves, (start, to) in enumerate(_slices(first, second, inner), start=1):
        target[to] = source[start]
        if moves % _MOVES == 0:
            yield 0


def _slices(first: int, second: int, inner: int) -> Iterator[tuple[slice, slice]]:
    """Yield the slices of source and target in the smallest number.

    They are the items of ``inner``, or one item of all places of the longer other dimension.
    """
    row, column = second * inner, first * inner  # items of a place of first, and of second
    if inner >= max(first, second):
        for place, other in product(range(first), range(second)):
            start, to = place * row + other * inner, other * column + place * inner
            yield slice(start, start + inner), slice(to, to + inner)
    elif first <= second:
        for place, item in product(range(first), range(inner)):
            start, to = place * row + item, place * inner + item
            yield slice(start, (place + 1) * row, inner), slice(to, None, column)
    else:
        for other, item in product(range(second), range(inner)):
            start, to = other * inner + item, other * column + item
            yield slice(start, None, row), slice(to, (other + 1) * column, inner)


def _row_ends(buffer: Buffer, elements: int, max_rows: int) -> Steps[list[int]]:
    ends: list[int] = []
    at = 0
    for number, element in enumerate(read_elements(buffer), start=1):
        at += element_bytes(element)
        if number % elements == 0:
            ends.append(at)
            if len(ends) == max_rows:
                break
        if number % _ELEMENTS == 0:
            yield 0
    return ends


def _blocks(predictions: Sequence[Prediction]) -> Iterator[tuple[Prediction, int]]:
    """Yield the predictions, and the number of rows that each is for."""
    at = 0
    while at < len(predictions):
        end = at + 1
        while end < len(predictions) and predictions[end] is REST_OF_BLOCK:
            end += 1
        yield predictions[at], end - at
        at = end
