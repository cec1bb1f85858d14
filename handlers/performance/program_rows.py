"""Programs that were exported for certain numbers of rows, as models for batches of any size.

torch.export fixes the shape of its example unless it is given dynamic dimensions: such a program
runs batches of exactly that size. Smaller batches are filled up with copies of their last row,
larger ones are run in pieces.

A package of AOTInductor does not check sizes: it reads and writes beyond the end of a smaller
batch. Its sizes are in the checks for debugging that torch 2.6 and later generate. A session of
onnxruntime refuses other sizes than that of its file.
"""

import importlib
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from marserve.handlers.performance.fixed_sizes import filled
from marserve.handlers.performance.trees import map_tensors, tensors_of

_CHECKED_ROWS = re.compile(
    rb'"input_handles\[(\d+)\]: unmatched dim value at 0, "\s*<< "expected: (\d+)'
)
_INPUT = re.compile(rb"check_input_(\d+)\(input_handles\)")
_UNBOUNDED = 2**31
_GENERALISED = 2  # the least size that torch assumes for dynamic dimensions; 1 runs as well


class Rows(NamedTuple):
    """The least and the largest number of rows that a program runs."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least} to {self.most}"

    def warnings(self, file: str, batch_size: int) -> Iterator[str]:
        """Yield what costs time when a program runs batches of up to ``batch_size``."""
        if not self.least <= batch_size <= self.most:
            is_small = batch_size < self.least
            effect = "each batch is filled up" if is_small else "larger ones are run in pieces"
            yield (
                f"{file} was exported for batches of {self}, but batchSize is {batch_size}: "
                f"{effect}. Set batchSize to {self.most}, or export it for any size."
            )


class ProgramForRows(nn.Module):
    """A program for batches of any size; attributes are those of the program."""

    def __init__(self, program: Callable[..., Any], rows: Rows) -> None:
        super().__init__()
        self.program = program
        self.rows = rows

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the program."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("program"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; the results have its number of rows."""
        counts = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of((args, kwargs))}
        rows = counts.pop() if len(counts) == 1 else 0
        if not rows or self.rows.least <= rows <= self.rows.most:
            return self.program(*args, **kwargs)
        pieces = []
        for start in range(0, rows, self.rows.most):
            piece = map_tensors(itemgetter(slice(start, start + self.rows.most)), (args, kwargs))
            pieces.append(self._run_piece(min(rows - start, self.rows.most), *piece))
        columns = zip(*map(tensors_of, pieces), strict=True)
        return map_tensors(lambda _: torch.cat(next(columns)), pieces[0])

    def _run_piece(self, rows: int, args: Any, kwargs: Any) -> Any:
        size = max(rows, self.rows.least)
        args, kwargs = map_tensors(lambda tensor: filled(tensor, size), (args, kwargs))
        result = self.program(*args, **kwargs)
        if any(not each.dim() or len(each) != size for each in tensors_of(result)):
            raise RuntimeError(
                f"The program was exported for {self.rows} rows and its results have no row for "
                f"each: it cannot run {rows}."
            )
        return map_tensors(itemgetter(slice(rows)), result)


class SessionForRows:
    """A session of onnxruntime for batches of any size; attributes are those of the session."""

    def __init__(self, session: Any, rows: Rows) -> None:
        self._numpy = importlib.import_module("numpy")  # onnxruntime needs it; others do not
        self._session = session
        self._ranks = {each.name: len(each.shape) for each in session.get_inputs()}
        self.rows = rows

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the session."""
        return getattr(vars(self)["_session"], name)

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> list[Any]:
        """Run a batch; the results have its number of rows."""
        size, numpy = self.rows.most, self._numpy
        feed = {name: numpy.asarray(value) for name, value in input_feed.items()}
        ranks = {name: array.ndim for name, array in feed.items()}
        counts = {len(array) for array in feed.values() if array.ndim}
        rows = counts.pop() if len(counts) == 1 else size
        if rows in (0, size) or ranks != self._ranks:
            found: list[Any] = self._session.run(output_names, input_feed, run_options)
            return found
        pieces = []
        for start in range(0, rows, size):
            places = numpy.minimum(numpy.arange(start, start + size), rows - 1)
            piece = {name: array[places] for name, array in feed.items()}
            pieces.append(self._session.run(output_names, piece, run_options))
        return [numpy.concatenate(column)[:rows] for column in zip(*pieces, strict=True)]


def rows_of_session(session: Any) -> Rows | None:
    """Return the number of rows of a session of onnxruntime, if it is fixed.

    That is the first dimension of all inputs, and of all outputs.
    """
    sizes = (each.shape[:1] for each in (*session.get_inputs(), *session.get_outputs()))
    return _common(
        Rows(size[0], size[0]) if size and isinstance(size[0], int) else None for size in sizes
    )


def rows_of_program(program: Any) -> Rows | None:
    """Return the numbers of rows of a program of torch.export, if they are bounded."""
    values = {
        node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"
    }
    ranges = {str(symbol): each for symbol, each in program.range_constraints.items()}
    sizes = _first_sizes(values.get(name) for name in program.graph_signature.user_inputs)
    return _common(_rows_of_size(size, ranges) for size in sizes)


def rows_of_package(path: str) -> Rows | None:
    """Return the numbers of rows of a package of AOTInductor, if they are bounded."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".cpp")]
        sources = [source for name in names if b"check_input_0(" in (source := archive.read(name))]
    if len(sources) != 1:  # no checks, or several models
        return None
    checked = {int(place): int(rows) for place, rows in _CHECKED_ROWS.findall(sources[0])}
    places = {int(place) for place in _INPUT.findall(sources[0])}
    return _common(
        Rows(checked[place], checked[place]) if place in checked else None for place in places
    )


def _first_sizes(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.shape[0] if value.dim() else None


def _rows_of_size(size: Any, ranges: dict[str, Any]) -> Rows | None:
    if isinstance(size, int):
        return Rows(size, size)
    found = ranges.get(str(size))
    if found is None or found.upper > _UNBOUNDED:
        return None
    least = int(found.lower)
    return Rows(1 if least <= _GENERALISED else least, int(found.upper))


def _common(found: Iterable[Rows | None]) -> Rows | None:
    """Return the rows that all inputs have; None if one has none, or others."""
    distinct = set(found)
    rows = distinct.pop() if len(distinct) == 1 else None
    return rows if rows is not None and rows.most else None
