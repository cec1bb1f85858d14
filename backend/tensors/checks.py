"""Checks the JSON of requests of the Open Inference Protocol, and of declarations of tensors.

Requests may contain more than the protocol allows, because TorchServe accepted it: any text as a
datatype, a -1 in a shape for the length that follows from the data, numbers of another datatype.
`check_values` is for models that declare tensors, and allows only the -1.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from marserve.backend.tensors.datatypes import (
    BYTES,
    DATATYPES,
    ITEM_BYTES,
    UnusableTensor,
    element_count,
    flattened,
    nested_shape,
    write_numbers,
)

#: The rule of `is_declaration`, for messages.
DECLARATION = (
    "a map of inputs and outputs to lists of tensors, each with name, datatype "
    f"({', '.join(DATATYPES)}) and shape (a list of lengths, -1 for any), perhaps optional: true "
    "or false, and arrays: true or false"
)
_MAX_LENGTH = 2**31 - 1
# Of a tensor without elements, whose empty lists take memory.
_MAX_EMPTY_LISTS = 10_000
_MAX_DIMENSION = 1 << 62
_MAX_NAME = 80  # characters in a message
_MAX_DIMENSIONS = 16  # in a message


def is_declaration(value: Any) -> bool:
    """Whether a value declares a model's tensors: ``inputs``, ``outputs``, and ``arrays``."""
    return isinstance(value, dict) and all(
        isinstance(member, bool)
        if key == "arrays"
        else key in ("inputs", "outputs")
        and isinstance(member, list)
        and all(map(_is_declared_tensor, member))
        for key, member in value.items()
    )


def _is_declared_tensor(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() - {"optional"} == {"name", "datatype", "shape"}
        and isinstance(value.get("optional", False), bool)
        and isinstance(value["name"], str)
        and value["datatype"] in DATATYPES
        and isinstance(value["shape"], list)
        and all(type(length) is int and -1 <= length <= _MAX_LENGTH for length in value["shape"])
    )


def check_request(document: Any) -> None:
    """Raise UnusableTensor if anything but the data of the inputs is wrong."""
    _require(isinstance(document, dict), "The body", "a JSON object")
    id_ = document.get("id")
    _require(id_ is None or isinstance(id_, str | int | float), "id", "a text")
    _check_parameters(document, "")
    inputs, outputs = document.get("inputs"), document.get("outputs") or []
    _require(isinstance(inputs, list) and bool(inputs), "inputs", "a list of at least one tensor")
    _require(isinstance(outputs, list), "outputs", "a list")
    for place, tensor in enumerate(inputs):
        where = f"inputs[{place}]"
        _check_named(tensor, where)
        _require(isinstance(tensor.get("datatype"), str), f"{where}.datatype", "a text")
        _require(_is_shape(tensor.get("shape")), f"{where}.shape", "a list of lengths")
    for place, tensor in enumerate(outputs):
        _check_named(tensor, f"outputs[{place}]")


def check_values(document: Any, declared: Sequence[Mapping[str, Any]]) -> None:
    """Raise UnusableTensor if an input in JSON contradicts its datatype or shape, or `declared`."""
    check_request(document)
    shapes = []
    for tensor in document["inputs"]:
        try:
            shapes.append(_check_data(tensor))
        except UnusableTensor as error:
            raise UnusableTensor(f"Input {tensor['name'][:_MAX_NAME]!r} {error}.") from error
    check_declared(document["inputs"], shapes, declared)


def check_declared(
    inputs: Iterable[Mapping[str, Any]],
    shapes: Iterable[list[int]],
    declared: Sequence[Mapping[str, Any]],
    rows_dim: int | None = None,
) -> None:
    """Raise UnusableTensor if an input that a model declares is not there once, or is another.

    The dimension ``rows_dim`` counts rows and may have any length. A declaration may leave it out,
    as in Triton's configurations. A scalar may have the shape []. Other inputs may be there, too.
    """
    if not declared:
        return
    found: dict[str, tuple[str, list[int]]] = {}
    repeated = set()
    for tensor, shape in zip(inputs, shapes, strict=True):
        if tensor["name"] in found:
            repeated.add(tensor["name"])
        found[tensor["name"]] = tensor["datatype"], shape
    for wanted in declared:
        name = wanted["name"]
        if name not in found:
            if wanted.get("optional"):
                continue
            raise UnusableTensor(f"Input {name!r} is missing.")
        if name in repeated:  # the handler may read another one than is checked here
            raise UnusableTensor(f"Input {name!r} is there more than once.")
        datatype, shape = found[name]
        if datatype != wanted["datatype"]:
            raise UnusableTensor(
                f"Input {name!r} has the datatype {datatype[:_MAX_NAME]!r}; the model takes "
                f"{wanted['datatype']}."
            )
        if not _fits(shape, wanted["shape"], rows_dim):
            raise UnusableTensor(
                f"Input {name!r} has the shape {shape[:_MAX_DIMENSIONS]}; the model takes "
                f"{wanted['shape']}."
            )


def _fits(shape: Sequence[int], wanted: Sequence[int], rows_dim: int | None) -> bool:
    if not shape:
        return all(length in (-1, 1) for length in wanted)
    if len(shape) == len(wanted) + 1:
        return has_shape(without(shape, rows_dim or 0), wanted)
    return has_shape(shape, wanted, rows_dim)


def has_shape(shape: Sequence[int], wanted: Sequence[int], rows_dim: int | None = None) -> bool:
    """Whether a shape has the wanted lengths, where -1 is any and ``rows_dim`` may have any."""
    return len(shape) == len(wanted) and all(
        length in (-1, own) or dim == rows_dim
        for dim, (own, length) in enumerate(zip(shape, wanted, strict=True))
    )


def without(shape: Sequence[int], dim: int) -> list[int]:
    """Return a shape without one of its dimensions, if it is there."""
    return [*shape[:dim], *shape[dim + 1 :]]


def _check_data(tensor: Mapping[str, Any]) -> list[int]:
    """Check the data of an input, and return its shape."""
    datatype, shape = tensor["datatype"], tensor["shape"]
    if datatype != BYTES:
        item_bytes(datatype)
    if "data" not in tensor:
        raise UnusableTensor("has no data")
    values = flattened(tensor["data"], nested_shape(tensor["data"]))
    if datatype != BYTES:
        write_numbers(datatype, values)
    resolved = resolved_shape(shape, len(values))
    count = element_count(resolved)
    if len(values) != count:
        raise UnusableTensor(f"has {len(values)} elements; its shape {shape} wants {count}")
    return resolved


def item_bytes(datatype: str) -> int:
    """Return the bytes of a number; raises UnusableTensor for an unknown datatype."""
    if datatype not in ITEM_BYTES:
        raise UnusableTensor(
            f"has the datatype {datatype[:_MAX_NAME]!r}; there are {', '.join(DATATYPES)}"
        )
    return ITEM_BYTES[datatype]


def resolved_shape(shape: list[int], count: int) -> list[int]:
    """Return the shape with -1 replaced by the length that follows from the number of elements."""
    if -1 not in shape:
        return shape
    place = shape.index(-1)
    before, behind = shape[:place], shape[place + 1 :]
    return [*before, count // max(1, element_count([*before, *behind])), *behind]


def _check_named(tensor: Any, where: str) -> None:
    _require(isinstance(tensor, dict), where, "a JSON object")
    _require(isinstance(tensor.get("name"), str), f"{where}.name", "a text")
    _check_parameters(tensor, f"{where}.")


def _check_parameters(members: Mapping[str, Any], where: str) -> None:
    parameters = members.get("parameters")
    _require(isinstance(parameters, dict | None), f"{where}parameters", "a JSON object")


def _is_shape(value: Any) -> bool:
    if not isinstance(value, list) or not all(
        type(length) is int and -1 <= length <= _MAX_DIMENSION for length in value
    ):
        return False
    return 0 not in value or prod(value[: value.index(0)]) <= _MAX_EMPTY_LISTS


def _require(is_right: bool, what: str, rule: str) -> None:
    if not is_right:
        raise UnusableTensor(f"{what} must be {rule}.")
