"""Rows of tensors: the shape of one row, and the outputs of rows joined to those of a request."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from marserve.backend.protocol import Buffer
from marserve.backend.tensors.datatypes import UnusableTensor


@dataclass
class Output:
    """A tensor of an answer, and its bytes."""

    name: str
    datatype: str
    shape: list[int]
    buffer: Buffer
    parameters: dict[str, Any] = field(default_factory=dict)


def one_row_of(shape: Sequence[int], dim: int) -> list[int]:
    """Return the shape of one row of a tensor whose dimension ``dim`` counts rows."""
    return [*shape[:dim], 1, *shape[dim + 1 :]]


class OutputJoiner:
    """Joins the outputs of successive rows, whose bytes are row after row for any dimension."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._rows = 0
        self._outputs: list[Output] = []
        self._buffers: list[list[Buffer]] = []

    def add(self, outputs: Sequence[Output], rows: int) -> None:
        """Add the outputs of the next rows; raises UnusableTensor if they do not fit."""
        if not self._rows:
            self._outputs = list(outputs)
            self._buffers = [[] for _ in outputs]
        self._rows += rows
        names, others = ([output.name for output in each] for each in (self._outputs, outputs))
        if names != others:
            raise UnusableTensor(
                f"some rows have the outputs {', '.join(names) or 'none'}, and others "
                f"{', '.join(others) or 'none'}"
            )
        for buffers, first, output in zip(self._buffers, self._outputs, outputs, strict=True):
            self._check(output, first, rows)
            buffers.append(output.buffer)

    def pieces(self) -> Iterator[tuple[Output, list[Buffer]]]:
        """Iterate over the outputs of all rows, and the buffers of each that are to be joined."""
        for output, buffers in zip(self._outputs, self._buffers, strict=True):
            output.shape[self._dim] = self._rows
            yield output, buffers

    def joined(self) -> list[Output]:
        """Return the outputs of all rows."""
        for output, buffers in self.pieces():
            output.buffer = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        return self._outputs

    def _check(self, output: Output, first: Output, rows: int) -> None:
        name, shape, dim = output.name, output.shape, self._dim
        if len(shape) <= dim:
            raise UnusableTensor(
                f"output {name!r} has the shape {shape}, and no dimension {dim} for the batch"
            )
        if shape[dim] != rows:
            raise UnusableTensor(
                f"output {name!r} has the shape {shape} for {rows} row{'s' if rows > 1 else ''}: "
                f"its dimension {dim} counts the rows"
            )
        kinds = [(each.datatype, one_row_of(each.shape, dim)) for each in (output, first)]
        if kinds[0] != kinds[1]:
            raise UnusableTensor(
                f"output {name!r} is {first.datatype} {first.shape} for some rows, and "
                f"{output.datatype} {shape} for others"
            )
