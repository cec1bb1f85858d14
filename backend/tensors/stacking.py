"""Stacks the rows of a batch to arrays, for handlers that ask for them (``stackInputs``).

Such a handler gets a dict with an array of numpy, or a tensor of torch, for each named input: all
rows of the batch along one dimension. It returns arrays of as many rows, or a list with a result
for each row, as any handler may. A batch that is one block is not copied.

In JSON, a number or nested lists of numbers are a row of the only input that the model declares,
else of ``body``; an object has a row for each input, by name.

Rows with different names, datatypes or shapes cannot be in one array: the handler is called for
each kind of rows.
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marserve.backend.errors import HANDLER_LOG
from marserve.backend.protocol import TENSORS_TYPE, Input, Part
from marserve.backend.tensors.arrays import flat_array, is_array, moved, on_cpu, rounded, widened
from marserve.backend.tensors.checks import has_shape, without
from marserve.backend.tensors.datatypes import BF16, BYTES, NUMPY
from marserve.backend.tensors.outputs import outputs_of
from marserve.backend.tensors.rows import Output, one_row_of
from marserve.backend.tensors.wire import UNREADABLE, Json, unpack_request

TORCH_TENSORS = "torch"

logger = logging.getLogger(HANDLER_LOG)

_BODY = "body"
_NUMBERS = "biuf"  # numpy's kinds: booleans, integers, floats
_MAX_QUOTED = 200

#: By input, an array whose first dimension counts rows.
Arrays = dict[str, Any]
RowOf = Callable[[Input], dict[str, Any]]


class Unstackable(Exception):
    """An input is not a row of arrays; the message is for its client."""


@dataclass(frozen=True)
class Stack:
    """Inputs of a batch whose rows can be stacked: their places, and arrays for each tensor."""

    stacking: "Stacking"
    places: list[int] = field(default_factory=list)
    columns: dict[str, tuple[str, list[Any]]] = field(default_factory=dict)

    def arrays(self, run_as: int) -> Arrays:
        """Return the arrays for the handler, with the last row repeated up to ``run_as`` rows."""
        join = self.stacking.joined
        return {name: join(kind, arrays, run_as) for name, (kind, arrays) in self.columns.items()}


@dataclass(frozen=True)
class StackedBatch:
    """A batch by kinds of rows; ``refused`` has the reasons by place."""

    stacks: Sequence[Stack]
    refused: Mapping[int, str]

    @property
    def whole(self) -> Stack | None:
        """The batch as one stack, if it is one."""
        return self.stacks[0] if len(self.stacks) == 1 and not self.refused else None


class Stacking:
    """Stacks the rows of a model to arrays of a library; raises ImportError if it is missing.

    ``declared`` are the inputs that the model declares (`checks.is_declaration`).
    """

    def __init__(self, library: str, dim: int, declared: Sequence[Json]) -> None:
        self._numpy = importlib.import_module("numpy")
        self._torch = importlib.import_module("torch") if library == TORCH_TENSORS else None
        self._dim = dim
        self._datatypes = {each["name"]: each["datatype"] for each in declared}
        #: The shapes of a row; a declaration may leave out the dimension that counts rows.
        self._row_shapes = {
            each["name"]: (without(each["shape"], dim), each["shape"]) for each in declared
        }
        self._needed = [each["name"] for each in declared if not each.get("optional")]
        self._default = declared[0]["name"] if len(declared) == 1 else _BODY

    def read(self, row_of: RowOf, inputs: Sequence[Input], rows: Sequence[int]) -> StackedBatch:
        """Sort the inputs of a batch by the kinds of their rows; ``row_of`` decodes plain ones."""
        stacks: dict[Any, Stack] = {}
        refused: dict[int, str] = {}
        counts = rows or [1] * len(inputs)
        for place, (input_, count) in enumerate(zip(inputs, counts, strict=True)):
            try:
                arrays = self._arrays_of(row_of, input_, count)
            except Unstackable as error:
                refused[place] = str(error)
                continue
            except Exception as error:  # of a library, for a client's numbers
                logger.warning("Request %d cannot be stacked.", place, exc_info=True)
                refused[place] = f"The request cannot be stacked: {type(error).__name__}."
                continue
            kind = tuple((name, of, each.shape[1:]) for name, (of, each) in sorted(arrays.items()))
            stack = stacks.setdefault(kind, Stack(self))
            stack.places.append(place)
            for name, (datatype, array) in arrays.items():
                stack.columns.setdefault(name, (datatype, []))[1].append(array)
        return StackedBatch([*stacks.values()], refused)

    def joined(self, datatype: str, arrays: Sequence[Any], run_as: int) -> Any:
        """Return one array, with the rows along the model's dimension."""
        array, torch = arrays[0], self._torch
        count = sum(map(len, arrays))
        if len(arrays) > 1 or run_as > count:
            padding = [arrays[-1][-1:]] * (run_as - count)
            array = self._numpy.concatenate([*arrays, *padding])
        elif not (array.flags.aligned and array.flags.writeable):
            array = array.copy()
        if torch is not None:
            tensor = torch.from_numpy(array)
            return moved(tensor.view(torch.bfloat16) if datatype == BF16 else tensor, 0, self._dim)
        return moved(widened(array) if datatype == BF16 else array, 0, self._dim)

    def _arrays_of(self, row_of: RowOf, input_: Input, count: int) -> dict[str, tuple[str, Any]]:
        parts = input_.parts
        if len(parts) == 1 and parts[0].content_type == TENSORS_TYPE:
            try:
                return self._tensors(parts[0], count)
            except UNREADABLE as error:
                raise Unstackable(f"The body is no request with tensors: {error!r}") from error
        row = row_of(input_)
        if row.keys() == {_BODY}:
            body = row[_BODY]
            row = body if isinstance(body, dict) else {self._default: body}
        if not row:
            raise Unstackable("There are no numbers in the request.")
        for name in self._needed:
            if name not in row:
                raise Unstackable(f"Input {name!r} is missing.")
        return {name: self._numbers(name, value) for name, value in row.items()}

    def _tensors(self, part: Part, count: int) -> dict[str, tuple[str, Any]]:
        found = {}
        for each in unpack_request(part.body)[1]:
            tensor = each.described
            name, datatype, shape = tensor["name"], tensor["datatype"], tensor["shape"]
            if len(shape) <= self._dim or shape[self._dim] != count:
                raise Unstackable(
                    f"Input {name!r} has the shape {shape}; its dimension {self._dim} counts rows, "
                    "and must be 1: dynamicBatchSize cuts inputs with several rows."
                )
            if datatype == BF16:
                flat = self._numpy.frombuffer(each.buffer, "<i2")
            elif datatype == BYTES and self._torch is not None:
                raise Unstackable(f"Input {name!r} is BYTES, of which torch has no tensors.")
            else:
                flat = flat_array(datatype, each.buffer)
            row = one_row_of(shape, self._dim)
            del row[self._dim]
            found[name] = datatype, flat.reshape([count, *row])
        return found

    def _numbers(self, name: str, value: Any) -> tuple[str, Any]:
        try:
            array = self._numpy.asarray(value)
        except (ValueError, TypeError, OverflowError) as error:  # lists of different lengths
            raise Unstackable(f"Input {name!r} cannot be an array: {error}") from error
        if array.dtype.kind not in _NUMBERS or isinstance(value, bytes | bytearray):
            text = repr(value)[:_MAX_QUOTED]
            raise Unstackable(f"Input {name!r} is no number and no lists of numbers: {text}")
        shapes = self._row_shapes.get(name)
        if shapes is not None and not any(has_shape(array.shape, each) for each in shapes):
            raise Unstackable(f"Input {name!r} has the shape {list(array.shape)}, not {shapes[0]}.")
        datatype = self._datatypes.get(name)
        if datatype is not None and datatype != BYTES:
            array = self._as_declared(name, array, datatype)
        elif self._torch is not None and array.dtype.kind == "f":
            array = array.astype("<f4")  # as torch.tensor does
        return datatype or str(array.dtype), array[None]

    def _as_declared(self, name: str, array: Any, datatype: str) -> Any:
        if datatype == BF16:
            return rounded(array)
        with self._numpy.errstate(all="ignore"):
            cast = array.astype(NUMPY[datatype])
        if cast.dtype.kind != "f" and not self._numpy.array_equal(cast, array):
            raise Unstackable(f"Input {name!r} has numbers that are no {datatype}.")
        return cast


class StackedResults:
    """The arrays that a handler returned for all rows of a batch.

    Their first dimension counts rows; in the handler's arrays it was ``dim``. An output without a
    name has an empty one.
    """

    def __init__(self, arrays: Arrays, dim: int) -> None:
        self._arrays = arrays
        self._dim = dim

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def plain_row(self, place: int) -> Any:
        """Return the result of one row as numbers and lists."""
        values = {
            name: array[place : place + 1].tolist()[0] for name, array in self._arrays.items()
        }
        return values.get("", values)

    def tensor_row(self, place: int) -> Any:
        """Return the result of one row as arrays, with the dimension for the batch."""
        values = {
            name: moved(array[place : place + 1], 0, self._dim)
            for name, array in self._arrays.items()
        }
        return values.get("", values)

    def outputs(self, start: int, count: int, name: str) -> list[Output]:
        """Return the outputs of rows of one request."""
        found = []
        for own, array in self._arrays.items():
            _, (output,) = outputs_of(array[start : start + count], own or name)
            rows, *shape = output.shape
            output.shape = [*shape[: self._dim], rows, *shape[self._dim :]]
            found.append(output)
        return found


def stacked_results(results: Any, dim: int) -> StackedResults | None:
    """Return the arrays that a handler returned, one or by name; None if it returned others."""
    named = results if isinstance(results, Mapping) else {"": results}
    if not named or not all(map(is_array, named.values())):
        return None
    if any(array.ndim <= dim for array in named.values()):
        return None
    if len({array.shape[dim] for array in named.values()}) > 1:
        return None
    return StackedResults(
        {str(name): moved(on_cpu(array), dim, 0) for name, array in named.items()}, dim
    )
