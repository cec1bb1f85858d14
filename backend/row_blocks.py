"""Rows of one request in tensors that follow each other in a batch: they travel as one block.

The frontend cuts a request whose tensors have several rows, and batches the rows of all clients
(`marserve.frontend.operations.tensor_rows`). To copy, describe and answer each row by itself would
cost far more than to run it. So neighbours of one request come as one `Input`, which is a request
of as many rows, and are answered by one prediction.

In requests and answers of blocks the bytes of a tensor are row after row, whichever dimension of
its shape counts the rows: so a block is cut and joined without moving anything within the rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from marserve.backend.context import RequestProcessor
from marserve.backend.conversion import Conversion
from marserve.backend.protocol import Input, Part, Reply
from marserve.backend.tensor_requests import AnswerFormat, one_row_of
from marserve.backend.tensor_results import Output, outputs_of
from marserve.backend.tensors import UnusableTensor

Json = dict[str, Any]


def row_inputs(inputs: Sequence[Input], rows: Sequence[int]) -> list[Input]:
    """An input for each row, with id and headers; of rows that are blocks, without their bodies.

    A block has the id of its first row, which ends in the number of the row in its request.
    """
    found: list[Input] = []
    for block, count in zip(inputs, rows, strict=True):
        found.append(block)
        if count > 1:
            own, _, number = block.id.rpartition(".")
            parts = [Part(part.name, part.content_type, b"") for part in block.parts]
            found += (
                Input(f"{own}.{int(number) + place}", block.headers, parts)
                for place in range(1, count)
            )
    return found


class RowResults(Protocol):
    """What a handler returned for the rows of a batch."""

    def row(self, place: int, *, is_plain: bool) -> Any:
        """The result of one row, ``is_plain`` if its client has not sent tensors."""

    def outputs(self, start: int, count: int, name: str, dim: int) -> tuple[Json, list[Output]]:
        """The outputs of rows of one request, and the members of the document around them.

        ``name`` is that of an output that has none; ``dim`` counts the rows.

        Raises:
            UnusableTensor: They cannot be sent, or those of rows cannot be joined.
        """


class ListedResults:
    """`RowResults` of a handler that returned a list."""

    def __init__(self, results: Sequence[Any]) -> None:
        self._results = results

    def row(self, place: int, *, is_plain: bool) -> Any:
        """See `RowResults`."""
        del is_plain
        return self._results[place]

    def outputs(self, start: int, count: int, name: str, dim: int) -> tuple[Json, list[Output]]:
        """See `RowResults`."""
        found = [outputs_of(result, name) for result in self._results[start : start + count]]
        columns = _columns([outputs for _, outputs in found])
        return found[0][0], [_joined(column, dim) for column in columns]


@dataclass(frozen=True)
class _BlockFormat:
    """How a block is answered."""

    form: AnswerFormat
    dim: int
    results: RowResults
    start: int
    count: int

    def encode(self, _result: Any) -> tuple[bytes, int]:
        """See `AnswerFormat.encode`."""
        name = self.form.output_name
        outputs = self.results.outputs(self.start, self.count, name, self.dim)
        return self.form.write(*outputs)


def answered_by_blocks(
    conversion: Conversion,
    results: RowResults,
    blocks: Sequence[int],
    formats: Mapping[int, AnswerFormat],
    processors: Sequence[RequestProcessor],
) -> Reply:
    """A prediction for each block, or for each row of one with statuses of the handler's.

    Args:
        conversion: Of the model.
        results: Of all rows.
        blocks: How many rows each of the inputs is.
        formats: Of the requests in tensors, by the places of their rows.
        processors: Of all rows.
    """
    reply, rows, start = Reply(), list[int](), 0
    for count in blocks:
        places = range(start, start + count)
        form = formats.get(start)
        if (
            count > 1
            and form
            and all(processors[row].get_response_status_code() == 200 for row in places)
        ):
            joint = _BlockFormat(form, conversion.dims[1], results, start, count)
            answer = conversion.tensors(start, None, processors[start], joint, count)
            reply.predictions.append(answer)
            rows.append(count)
        else:
            for row in places:
                result = results.row(row, is_plain=form is None)
                processor = processors[row]
                if form is None:
                    answer = conversion.prediction(row, result, processor)
                else:
                    answer = conversion.tensors(row, result, processor, form)
                reply.predictions.append(answer)
                rows.append(1)
        start += count
    reply.rows = tuple(rows)
    return reply


def _columns(rows: list[list[Output]]) -> list[tuple[Output, ...]]:
    names = [output.name for output in rows[0]]
    for outputs in rows:
        if (other := [output.name for output in outputs]) != names:
            raise UnusableTensor(
                f"a row has the outputs {', '.join(names) or 'none'}, and another "
                f"{', '.join(other) or 'none'}"
            )
    return list(zip(*rows, strict=True))


def _joined(rows: Sequence[Output], dim: int) -> Output:
    first = rows[0]
    for output in rows:
        if (output.datatype, output.shape) != (first.datatype, first.shape):
            raise UnusableTensor(
                f"output {first.name!r} of a row is {first.datatype} {first.shape}, and of another "
                f"{output.datatype} {output.shape}"
            )
    check_rows(first.name, first.shape, dim, 1)
    shape = one_row_of(first.shape, dim)
    shape[dim] = len(rows)
    buffer = b"".join(output.buffer for output in rows)
    return Output(first.name, first.datatype, shape, buffer, first.parameters)


def check_rows(name: str, shape: Sequence[int], dim: int, rows: int) -> None:
    """Check that an output has as many rows along its batch dimension.

    Raises:
        UnusableTensor: It has not.
    """
    if len(shape) <= dim:
        raise UnusableTensor(
            f"output {name!r} has the shape {list(shape)}, and no dimension {dim} for the batch"
        )
    if shape[dim] != rows:
        raise UnusableTensor(
            f"output {name!r} has the shape {list(shape)} for {rows} "
            f"row{'s' if rows > 1 else ''}: its dimension {dim} counts the rows"
        )
