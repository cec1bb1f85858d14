"""Cuts requests in tensors into their rows, and joins the answers to the rows.

For models with ``dynamicBatchSize``. An input of shape [7, 2] is seven rows of shape [1, 2], each a
request of its own for the queue and the batches: a large request is spread over several batches and
workers, and small ones of several clients share a batch. ``batchDim`` says which dimension counts
the rows, of inputs and of outputs.

Cut along the first dimension, rows are views of the bytes that came. Along another one the bytes
are first brought into the order of the rows, and those of the outputs back: see `row_blocks` on the
worker's side. All or nothing, as of any list (`client_lists`).
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from marserve.backend import tensors
from marserve.backend.protocol import TENSORS_TYPE, Buffer, Input, Part, Prediction
from marserve.backend.row_blocks import check_rows
from marserve.backend.tensor_requests import SIZE, one_row_of
from marserve.backend.tensors import BYTES, UnusableTensor
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.batching.rows import REST_OF_BLOCK, RowInput
from marserve.frontend.errors import BadRequest, PredictionFailed
from marserve.frontend.operations.client_lists import failed_item
from marserve.frontend.operations.json_tensors import AnswerBody, packed
from marserve.frontend.operations.open_inference_answers import (
    InferAnswer,
    OutputTensor,
    answer_of,
)

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_BODY = "body"
_MAX_NAME = 80
_ELEMENTS = 4096  # that are looked at in one step
_MOVES = 256  # slices that are moved in one step
_LENGTH_BYTES = 4  # in front of each element of BYTES
_UNITS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Unjoinable(PredictionFailed, status=503):
    """The answers to the rows of a request do not make one answer."""

    def __init__(self, why: str) -> None:
        super().__init__(f"The handler's answers to the rows cannot be joined: {why}.")


def row_count(inputs: Sequence[Json], dim: int) -> int:
    """How many rows the inputs of a request have.

    Raises:
        BadRequest: They differ, or there are none.
    """
    counts = {}
    for tensor in inputs:
        name, shape = tensor["name"][:_MAX_NAME], tensor["shape"]
        if len(shape) <= dim:
            raise BadRequest(
                f"Input {name!r} has the shape {shape}, and no dimension {dim}, which is to count "
                "the rows of the batch."
            )
        counts[name] = shape[dim]
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name!r} {count}" for name, count in counts.items())
        raise BadRequest(f"All inputs need as many rows along dimension {dim}; there are {told}.")
    count: int = next(iter(counts.values()))
    if not count:
        raise BadRequest(f"The inputs have no rows: their dimension {dim} has the length 0.")
    return count


@dataclass(frozen=True)
class Column:
    """An input of a request, its bytes in the order of the rows."""

    described: Json  # as its request has it
    buffer: memoryview
    elements: int  # of each row; of BYTES, whose lengths vary, 0
    row_bytes: int  # of each row, or, if rows differ,
    ends: Sequence[int] = ()  # where the rows end

    def rows(self, first: int, count: int) -> memoryview:
        """The bytes of some rows."""
        if not self.ends:
            return self.buffer[first * self.row_bytes : (first + count) * self.row_bytes]
        return self.buffer[self.ends[first - 1] if first else 0 : self.ends[first + count - 1]]


class TensorRows:
    """A request as its rows.

    Args:
        id_: The server's, for the request.
        headers: For the handler, with the format of an answer in bytes.
        head: The request's JSON for the worker, without its inputs.
        columns: The inputs.
        count: How many rows there are.
        dims: Which dimensions count the rows, of inputs and of outputs.
        max_rows: As many as can be queued: of more, one more is made, to be refused.
        form: How its answer is written over HTTP.

    Attributes:
        rows: Their inputs.
    """

    def __init__(
        self,
        id_: str,
        headers: dict[str, str],
        head: Json,
        columns: Sequence[Column],
        count: int,
        dims: tuple[int, int],
        max_rows: int,
        form: AnswerBody,
    ) -> None:
        self._id, self._headers, self._head = id_, headers, head
        self._columns = columns
        self._count = count
        self._dims = dims
        self._form = form
        self.rows = [
            RowInput(
                f"{id_}.{place}",
                headers,
                [Part(each.described["name"], "", each.rows(place, 1)) for each in columns],
                self,
                place,
                max(each.elements or len(each.rows(place, 1)) for each in columns),
            )
            for place in range(min(count, max_rows + 1))
        ]

    def block(self, first: int, count: int) -> Input:
        """See `batching.rows.Rows`."""
        inputs, buffers, dim = [], [], self._dims[0]
        for column in self._columns:
            buffer, described = column.rows(first, count), column.described
            shape = described["shape"].copy()
            shape[dim] = count
            parameters = {**described.get("parameters", {}), SIZE: len(buffer)}
            inputs.append({**described, "shape": shape, "parameters": parameters})
            buffers.append(buffer)
        _, body = packed({**self._head, "inputs": inputs}, buffers)
        return Input(f"{self._id}.{first}", self._headers, [Part(_BODY, TENSORS_TYPE, body)])

    def join(self, predictions: Sequence[Prediction]) -> Steps[Prediction]:
        """The answer over HTTP; see `client_lists.ClientList.join`."""
        if predictions[-1].status != 200:
            return failed_item(predictions)
        answer = yield from self.joined(predictions)
        return (yield from self._form.write(answer))

    def joined(self, predictions: Sequence[Prediction]) -> Steps[InferAnswer]:
        """One answer of those to the rows.

        Raises:
            PredictionFailed: One of them has failed, or they are not such as can be joined.
        """
        if (status := predictions[-1].status) != 200:
            answer_of(predictions[-1])  # raises what the handler has said, if it is an error
            number = len(predictions) - 1
            raise Unjoinable(f"row {number} was answered with status {status}")
        dim, whole = self._dims[1], InferAnswer()
        buffers: list[list[Buffer]] = []
        for prediction, count in _blocks(predictions):
            answer = answer_of(prediction)
            if not buffers:
                whole, buffers = answer, [[] for _ in answer.outputs]
            try:
                _check_alike(answer.outputs, whole.outputs, dim, count)
            except Unjoinable as error:
                logger.warning("%s: %s", self._id, error.message)
                raise
            for found, output in zip(buffers, answer.outputs, strict=True):
                found.append(output.buffer)
            yield
        for output, found in zip(whole.outputs, buffers, strict=True):
            output.buffer = found[0] if len(found) == 1 else b"".join(found)
            output.shape[dim] = self._count
            if dim:
                outer, inner = prod(output.shape[:dim]), prod(output.shape[dim + 1 :])
                moving = swapped(output.buffer, output.datatype, self._count, outer, inner)
                output.buffer = yield from moving
        return whole


def columns_of(
    inputs: Sequence[Json], buffers: Sequence[Buffer], count: int, dim: int
) -> Steps[list[Column]]:
    """The inputs of a request; their bytes are what datatypes and shapes say."""
    columns = []
    for tensor, buffer in zip(inputs, buffers, strict=True):
        shape, datatype = tensor["shape"], tensor["datatype"]
        outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
        if dim:
            buffer = yield from swapped(buffer, datatype, outer, count, inner)
        ends: Sequence[int] = ()
        if datatype == BYTES and outer * inner:
            ends = yield from _row_ends(buffer, outer * inner)
        elements = 0 if datatype == BYTES else outer * inner
        columns.append(Column(tensor, memoryview(buffer), elements, len(buffer) // count, ends))
    return columns


def swapped(buffer: Buffer, datatype: str, first: int, second: int, inner: int) -> Steps[Buffer]:
    """The bytes of a tensor of shape [first, second, inner], as of [second, first, inner]."""
    if min(first, second) == 1 or not inner:
        return buffer
    if datatype == BYTES:
        return (yield from _swapped_elements(buffer, first, second, inner))
    code = _UNITS[tensors.ITEM_BYTES[datatype]]
    written = bytearray(len(buffer))
    source, target = memoryview(buffer).cast("B").cast(code), memoryview(written).cast(code)
    yield from _swap(source, target, first, second, inner)
    return written


def _swapped_elements(buffer: Buffer, first: int, second: int, inner: int) -> Steps[Buffer]:
    elements: list[bytes] = []
    for element in tensors.read_elements(buffer):
        elements.append(element)
        if len(elements) % _ELEMENTS == 0:
            yield
    moved = [b""] * len(elements)
    yield from _swap(elements, moved, first, second, inner)
    pieces = []
    for start in range(0, len(moved), _ELEMENTS):
        pieces.append(tensors.write_elements(moved[start : start + _ELEMENTS]))
        yield
    return b"".join(pieces)


def _swap(source: Any, target: Any, first: int, second: int, inner: int) -> Steps[None]:
    """Move items, in the fewest slices: as they lie, or one item of each place at a time."""
    slices = _slices(first, second, inner)
    for moves, (start, stop, step, to, end, stride) in enumerate(slices, start=1):
        target[to:end:stride] = source[start:stop:step]
        if moves % _MOVES == 0:
            yield


def _slices(first: int, second: int, inner: int) -> Iterator[tuple[int, ...]]:
    """For each slice: start, stop and step where it is, and where it goes."""
    rows, columns = second * inner, first * inner  # items of one place of first, and of second
    everything = first * rows
    if inner >= max(first, second):
        for place in range(first):
            for other in range(second):
                start, to = place * rows + other * inner, other * columns + place * inner
                yield start, start + inner, 1, to, to + inner, 1
    elif first <= second:
        for place in range(first):
            for item in range(inner):
                start, to = place * rows + item, place * inner + item
                yield start, (place + 1) * rows, inner, to, everything, columns
    else:
        for other in range(second):
            for item in range(inner):
                start, to = other * inner + item, other * columns + item
                yield start, everything, rows, to, (other + 1) * columns, inner


def _row_ends(buffer: Buffer, elements: int) -> Steps[list[int]]:
    """Where the rows of so many elements of BYTES end."""
    ends, at = [], 0
    for number, element in enumerate(tensors.read_elements(buffer), start=1):
        at += _LENGTH_BYTES + len(element)
        if number % elements == 0:
            ends.append(at)
        if number % _ELEMENTS == 0:
            yield
    return ends


def _blocks(predictions: Sequence[Prediction]) -> Iterator[tuple[Prediction, int]]:
    """The predictions that are for several rows, or for one, and for how many."""
    at = 0
    while at < len(predictions):
        end = at + 1
        while end < len(predictions) and predictions[end] is REST_OF_BLOCK:
            end += 1
        yield predictions[at], end - at
        at = end


def _check_alike(
    outputs: Sequence[OutputTensor], first: Sequence[OutputTensor], dim: int, rows: int
) -> None:
    """Check that the outputs of rows are those of the first, but for the number of rows."""
    names, others = ([output.name for output in each] for each in (first, outputs))
    if names != others:
        raise Unjoinable(
            f"some have the outputs {', '.join(names) or 'none'}, and some "
            f"{', '.join(others) or 'none'}"
        )
    for output, other in zip(outputs, first, strict=True):
        try:
            check_rows(output.name, output.shape, dim, rows)
        except UnusableTensor as error:
            raise Unjoinable(str(error)) from error
        if _kind(output, dim) != _kind(other, dim):
            raise Unjoinable(
                f"output {output.name!r} is {other.datatype} {other.shape} of some, and "
                f"{output.datatype} {output.shape} of others"
            )


def _kind(output: OutputTensor, dim: int) -> tuple[str, list[int]]:
    return output.datatype, one_row_of(output.shape, dim)
