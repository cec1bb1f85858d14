"""Stacks the rows of a batch to arrays, for handlers that ask for them (``stackInputs``).

Such a handler gets a dict with an array of numpy, or a tensor of torch, for each named input: all
rows of the batch along one dimension. It returns arrays of as many rows, which are cut again, or a
list with a result for each row, as any handler may.

* Tensors of the Open Inference Protocol have names, datatypes and shapes. Rows of one request that
  follow each other come as a block (`row_blocks`); a batch that is one block is not copied at all.
* Of JSON, a number or nested lists of numbers are a row of the one input that the model declares,
  else of ``body``, and an object has a row for each input by name. They get the datatype that is
  declared for that name, else the one that numpy (torch) takes them for.
* What is neither costs only its own sender an answer: 400.

Rows that differ in names, datatypes or shapes cannot be in one array, and no client can help the
shapes of strangers: the handler is called for each kind of rows by itself.
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from marserve.backend.conversion import Conversion, is_tensor, tensor_error
from marserve.backend.errors import HANDLER_LOG
from marserve.backend.protocol import TENSORS_TYPE, Input, Part, Piece, Reply
from marserve.backend.tensor_requests import flat_array, one_row_of, tensors_of
from marserve.backend.tensor_results import Output, is_array, outputs_of
from marserve.backend.tensors import BYTES, NUMPY

NUMPY_ARRAYS, TORCH_TENSORS = "numpy", "torch"

logger = logging.getLogger(HANDLER_LOG)

_BODY = "body"
_BFLOAT16 = "BF16"
_NUMBERS = "biuf"  # numpy's kinds: booleans, integers, floats
_MAX_QUOTED = 200

#: An array whose first dimension counts rows, by input.
Arrays = dict[str, Any]
Json = dict[str, Any]


class Unstackable(Exception):
    """An input is no row of arrays; the text is for its client."""


@dataclass(frozen=True)
class Stack:
    """Inputs of a batch whose rows stack.

    Attributes:
        places: Of the inputs.
        columns: For each input of the model its datatype, and the arrays of the inputs, in order.
    """

    stacking: "Stacking"
    places: list[int] = field(default_factory=list)
    columns: dict[str, tuple[str, list[Any]]] = field(default_factory=dict)

    def arrays(self, run_as: int) -> Arrays:
        """What the handler gets; the last row is repeated until there are ``run_as``."""
        make = self.stacking.joined
        return {name: make(kind, arrays, run_as) for name, (kind, arrays) in self.columns.items()}


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
    """How the rows of a model are stacked.

    Args:
        library: ``numpy`` or ``torch``.
        dim: The dimension that has the rows.
        declared: The inputs that the model declares, as of `tensors.is_declaration`.

    Raises:
        ImportError: The library is not there.
    """

    def __init__(self, library: str, dim: int, declared: Sequence[Json]) -> None:
        self._numpy = importlib.import_module("numpy")
        self._torch = importlib.import_module("torch") if library == TORCH_TENSORS else None
        self._dim = dim
        self._datatypes = {each["name"]: each["datatype"] for each in declared}
        self._default = declared[0]["name"] if len(declared) == 1 else _BODY

    def read(
        self, conversion: Conversion, inputs: Sequence[Input], rows: Sequence[int]
    ) -> StackedBatch:
        """Sort the inputs of a batch by the kinds of their rows."""
        stacks: dict[Any, Stack] = {}
        refused: dict[int, str] = {}
        for place, (input_, count) in enumerate(
            zip(inputs, rows or [1] * len(inputs), strict=True)
        ):
            try:
                arrays = self._arrays_of(conversion, input_, count)
            except Unstackable as error:
                refused[place] = str(error)
                continue
            except Exception as error:  # whatever a library thinks of a stranger's numbers
                logger.warning("Request %d makes no arrays.", place, exc_info=True)
                refused[place] = f"The request makes no arrays: {type(error).__name__}."
                continue
            kind = tuple((name, of, each.shape[1:]) for name, (of, each) in sorted(arrays.items()))
            stack = stacks.setdefault(kind, Stack(self))
            stack.places.append(place)
            for name, (datatype, array) in arrays.items():
                stack.columns.setdefault(name, (datatype, []))[1].append(array)
        return StackedBatch([*stacks.values()], refused)

    def joined(self, datatype: str, arrays: Sequence[Any], run_as: int) -> Any:
        """One array of the arrays of inputs, with the rows where the model has them."""
        array, numpy, torch = arrays[0], self._numpy, self._torch
        count = sum(map(len, arrays))
        if len(arrays) > 1 or run_as > count:
            padding = [arrays[-1][-1:]] * (run_as - count)
            array = numpy.concatenate([*arrays, *padding])
        elif not (array.flags.aligned and array.flags.writeable):
            array = array.copy()
        if torch is not None:
            tensor = torch.from_numpy(array)
            tensor = tensor.view(torch.bfloat16) if datatype == _BFLOAT16 else tensor
            return tensor.movedim(0, self._dim) if self._dim else tensor
        if datatype == _BFLOAT16:
            array = (array.view("<u2").astype("<u4") << 16).view("<f4")
        return numpy.moveaxis(array, 0, self._dim) if self._dim else array

    def _arrays_of(
        self, conversion: Conversion, input_: Input, count: int
    ) -> dict[str, tuple[str, Any]]:
        """The datatype of each input, and its rows."""
        parts = input_.parts
        if len(parts) == 1 and parts[0].content_type == TENSORS_TYPE:
            try:
                return self._tensors(parts[0], count)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Unstackable(f"The body is no request with tensors: {error!r}") from error
        row = conversion.row(input_)
        if row.keys() == {_BODY}:
            body = row[_BODY]
            row = body if isinstance(body, dict) else {self._default: body}
        if not row:
            raise Unstackable("There are no numbers in the request.")
        return {name: self._numbers(name, value) for name, value in row.items()}

    def _tensors(self, part: Part, count: int) -> dict[str, tuple[str, Any]]:
        found = {}
        for tensor, buffer, _ in tensors_of(part.body)[1]:
            name, datatype, shape = tensor["name"], tensor["datatype"], tensor["shape"]
            if len(shape) <= self._dim or shape[self._dim] != count:
                raise Unstackable(
                    f"Input {name!r} has the shape {shape}; its dimension {self._dim} counts rows, "
                    "and there is to be one: dynamicBatchSize cuts those of several."
                )
            if datatype == _BFLOAT16:
                flat = self._numpy.frombuffer(buffer, "<i2")
            elif datatype == BYTES and self._torch is not None:
                raise Unstackable(f"Input {name!r} is BYTES, of which torch has no tensors.")
            else:
                flat = flat_array(datatype, buffer)
            row = one_row_of(shape, self._dim)
            del row[self._dim]
            found[name] = datatype, flat.reshape([count, *row])
        return found

    def _numbers(self, name: str, value: Any) -> tuple[str, Any]:
        numpy = self._numpy
        try:
            array = numpy.asarray(value)
        except (ValueError, TypeError, OverflowError) as error:  # lists of different lengths
            raise Unstackable(f"Input {name!r} cannot be an array: {error}") from error
        if array.dtype.kind not in _NUMBERS or isinstance(value, bytes | bytearray):
            text = repr(value)[:_MAX_QUOTED]
            raise Unstackable(f"Input {name!r} is no number and no lists of numbers: {text}")
        datatype = self._datatypes.get(name)
        if datatype is not None and datatype != BYTES:
            array = self._as_declared(name, array, datatype)
        elif self._torch is not None and array.dtype.kind == "f":
            array = array.astype("<f4")  # as torch.tensor makes them
        return datatype or str(array.dtype), array[None]

    def _as_declared(self, name: str, array: Any, datatype: str) -> Any:
        numpy = self._numpy
        if datatype == _BFLOAT16:
            wide = array.astype("<f4").view("<u4")
            return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("<u2").view("<i2")
        with numpy.errstate(all="ignore"):
            cast = array.astype(NUMPY[datatype])
        if cast.dtype.kind != "f" and not numpy.array_equal(cast, array):
            raise Unstackable(f"Input {name!r} has numbers that are no {datatype}.")
        return cast


class StackedResults:
    """Arrays that a handler returned for all rows of a batch, a `row_blocks.RowResults`.

    Args:
        arrays: By output; under the empty name one that has none. Their first dimension counts.
        dim: The one that counted before.
    """

    def __init__(self, arrays: Arrays, dim: int) -> None:
        self._arrays = arrays
        self._dim = dim

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def row(self, place: int, *, is_plain: bool) -> Any:
        """See `RowResults`: a tensor's row keeps its dimension for the batch, JSON has none."""
        if is_plain:
            values = {
                name: array[place : place + 1].tolist()[0] for name, array in self._arrays.items()
            }
        else:
            values = {
                name: _moved(array[place : place + 1], 0, self._dim)
                for name, array in self._arrays.items()
            }
        return values.get("", values)

    def outputs(self, start: int, count: int, name: str, dim: int) -> tuple[Json, list[Output]]:
        """See `RowResults`."""
        found = []
        for own, array in self._arrays.items():
            _, (output,) = outputs_of(array[start : start + count], own or name)
            rows, *shape = output.shape
            output.shape = [*shape[:dim], rows, *shape[dim:]]
            found.append(output)
        return {}, found


def stacked_results(results: Any, dim: int) -> StackedResults | None:
    """The arrays that a handler returned, one or by name; None if it has returned anything else."""
    named = results if isinstance(results, Mapping) else {"": results}
    if not named or not all(map(is_array, named.values())):
        return None
    if any(array.ndim <= dim for array in named.values()):
        return None
    if len({array.shape[dim] for array in named.values()}) > 1:
        return None
    arrays = {str(name): _moved(_on_cpu(array), dim, 0) for name, array in named.items()}
    return StackedResults(arrays, dim)


def predict_stacked(
    predict: Callable[..., Reply],
    batch: StackedBatch,
    inputs: Sequence[Input],
    send: Callable[[Piece], None],
    run_as: int,
    rows: Sequence[int],
) -> Reply:
    """Call ``predict``, which is `Service._predict`, once for each stack of a batch."""
    if (stack := batch.whole) is not None:
        return predict(inputs, send, run_as, rows, stack)
    counts = rows or [1] * len(inputs)
    starts = [sum(counts[:place]) for place in range(len(inputs))]
    answers = {
        place: [(tensor_error(400, why, "BadRequestException"), counts[place])]
        for place, why in batch.refused.items()
    }
    whole, all_rows = Reply(), list[int]()
    for stack in batch.stacks:
        of_stack = [counts[place] for place in stack.places]
        numbers = [starts[place] + row for place in stack.places for row in range(counts[place])]
        pad = run_as if run_as > sum(counts) else 0
        reply = predict(
            [inputs[place] for place in stack.places],
            partial(_send_from, send, numbers),
            pad,
            of_stack,
            stack,
        )
        reply.metrics = whole.metrics + reply.metrics
        reply.handler_ms += whole.handler_ms
        if reply.code != 200:
            return reply
        whole.metrics, whole.handler_ms = reply.metrics, reply.handler_ms
        left = iter(zip(reply.predictions, reply.rows, strict=True))
        for place in stack.places:
            answers[place] = [next(left)]
            while sum(count for _, count in answers[place]) < counts[place]:
                answers[place].append(next(left))
    for place in range(len(inputs)):
        whole.predictions += (prediction for prediction, _ in answers[place])
        all_rows += (count for _, count in answers[place])
    whole.rows = tuple(all_rows)
    return whole


def _on_cpu(array: Any) -> Any:
    return array.detach().cpu() if is_tensor(array) else array


def _moved(array: Any, source: int, destination: int) -> Any:
    """An array with a dimension at another place; a view of it."""
    if source == destination:
        return array
    if is_tensor(array):
        return array.movedim(source, destination)
    return importlib.import_module("numpy").moveaxis(array, source, destination)


def _send_from(send: Callable[[Piece], None], numbers: Sequence[int], piece: Piece) -> None:
    """Send a piece of a stack's answer with the places in the batch."""
    piece.places = [numbers[place] for place in piece.places]
    send(piece)
