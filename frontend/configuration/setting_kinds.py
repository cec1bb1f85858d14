"""The kinds of values of settings, each with its rule as text and as JSON Schema.

A rule completes the sentences "it is ..." and "it takes ...". Values are those of yaml and JSON;
the text of a query is first parsed to such a value.
"""

import re
import reprlib
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Any

from marserve.backend.tensors.checks import DECLARATION, is_declaration

Json = dict[str, Any]

#: The largest number of the contract, a Java int.
MAX_NUMBER = 2**31 - 1
#: Instead of a number: the server measures it.
AUTOMATIC = "auto"

# Each is tried when the model is loaded.
_MAX_SIZES = 64
_MAX_DIMENSION = 63  # the last that a tensor can have
_MAX_BITS = 128
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[+-]?[0-9]{0,12}\.?[0-9]{1,24}(e[+-]?[0-9]{1,3})?", re.IGNORECASE)


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2  # aliases of a yaml can expand to gigabytes

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write thousands of digits.
        if x.bit_length() > _MAX_BITS:
            return f"<a number of {x.bit_length()} bits>"
        return super().repr_int(x, level)


#: Returns a short text of a value of any size.
short_repr: Callable[[object], str] = _ShortRepr().repr


def _unchanged(value: Any) -> Any:
    return value


def _number(text: str) -> int | str:
    return int(text) if _WHOLE.fullmatch(text) else text


def plain_number(value: object) -> object:
    """Return the number that a JSON text or fraction represents; else the value."""
    if isinstance(value, str):
        number = _number(value.strip())
        return number if isinstance(number, int) else value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _decimal(text: str) -> float | str:
    return float(text) if _DECIMAL.fullmatch(text) else text


@dataclass(frozen=True)
class Kind:
    """A kind of value."""

    rule: str  # what is allowed, as text
    accepts: Callable[[Any], bool]
    schema: Json = field(default_factory=dict)  # of what it accepts
    read: Callable[[Any], Any] = _unchanged  # an accepted value to the value that the server uses
    write: Callable[[Any], Any] = _unchanged  # the reverse, for describe calls and snapshots
    #: The text of a query to a value; white space is stripped. A text that is wrong stays a text.
    parse: Callable[[str], Any] = _number
    query_schema: Json | None = None  # of a query, if it differs from `schema`

    def from_text(self, text: str) -> Any:
        """Return the value of a text of config.properties; ValueError has the rule."""
        value = self.parse(text)
        if not self.accepts(value):
            raise ValueError(self.rule)
        return self.read(value)


def is_whole(value: object, minimum: int, maximum: int = MAX_NUMBER) -> bool:
    """Return whether a value is a whole number within bounds."""
    return type(value) is int and minimum <= value <= maximum


def whole(minimum: int, maximum: int = MAX_NUMBER) -> Kind:
    """Return the kind of whole numbers."""
    bounds = f", {minimum} or more" if maximum >= MAX_NUMBER else f" from {minimum} to {maximum}"
    return Kind(
        f"a whole number{bounds}",
        lambda value: is_whole(value, minimum, maximum),
        {"type": "integer", "format": "int32", "minimum": minimum, "maximum": maximum},
        write=round,
    )


def milliseconds(kind: Kind) -> Kind:
    """Return the kind of whole milliseconds, used as seconds."""
    return replace(kind, read=lambda ms: ms / 1000, write=lambda seconds: round(seconds * 1000))


def word(*words: str, rule: str = "", any_case: bool = False) -> Kind:
    """Return the kind of some words."""

    def accepts(value: Any) -> bool:
        return isinstance(value, str) and (value.lower() if any_case else value) in words

    schema = {"type": "string", "enum": list(words)}
    read = str.lower if any_case else _unchanged
    return Kind(rule or f"one of {', '.join(words)}", accepts, schema, read, parse=_unchanged)


FLAG = Kind(
    "true or false",
    lambda value: type(value) is bool,
    {"type": "boolean"},
    parse=lambda text: {"true": True, "false": False}.get(text.lower(), text),
)
#: Instead of true: a difference is a warning and does not refuse the model.
WARN = "warn"
REFUSE = "refuse"
_SWITCHED = {True: REFUSE, WARN: WARN, AUTOMATIC: AUTOMATIC, False: ""}
CHECK = Kind(
    f"true, false, {WARN} or {AUTOMATIC}",
    lambda value: type(value) is bool or value in (WARN, AUTOMATIC),
    {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": [WARN, AUTOMATIC]}]},
    read=lambda value: _SWITCHED[value],
    write=lambda read: next(value for value, found in _SWITCHED.items() if found == read),
    parse=FLAG.parse,
)
TEXT = Kind("a text", lambda value: isinstance(value, str), parse=_unchanged)
_MAX_FILES = 16


def _are_files(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    are_names = all(isinstance(name, str) and name != "" for name in names)
    return are_names and 0 < len(names) <= _MAX_FILES


FILES = Kind(
    "a file's name, or a list of some",
    _are_files,
    read=lambda value: tuple(value) if isinstance(value, list) else (value,),
    write=list,
)
ABOVE_0 = Kind(
    "a number above 0",
    lambda value: type(value) in (int, float) and 0 < value <= MAX_NUMBER,
    {"type": "number", "minimum": 0, "exclusiveMinimum": True},
    parse=_decimal,
)
TENSORS = Kind(DECLARATION, is_declaration)
MAPPING = Kind("a map", lambda value: isinstance(value, dict))


def automatic_or(kind: Kind) -> Kind:
    """Return a kind of numbers that also accepts `AUTOMATIC`."""
    return Kind(
        f"{kind.rule}, or {AUTOMATIC}",
        lambda value: value == AUTOMATIC or kind.accepts(value),
        {
            "anyOf": [
                {"description": "A number.", **kind.schema},
                {"type": "string", "description": "By measuring.", "enum": [AUTOMATIC]},
            ]
        },
    )


def _list_of(rule: str, minimum: int, maximum: int = MAX_NUMBER) -> Kind:

    def accepts(value: Any) -> bool:
        return isinstance(value, list) and all(is_whole(each, minimum, maximum) for each in value)

    schema = {"type": "array", "items": {"type": "integer"}}
    return Kind(rule, accepts, schema, read=tuple, write=list)


_SIZES = _list_of("a list of whole numbers, rising, each 1 or more; empty for any size", 1)
SIZES = replace(
    _SIZES,
    accepts=lambda value: _SIZES.accepts(value) and len(value) <= _MAX_SIZES,
    parse=lambda text: [_number(item.strip()) for item in text.split(",")] if text else [],
    query_schema={"type": "string"},
)


def _is_dimension(value: Any) -> bool:
    return is_whole(value, 0, _MAX_DIMENSION)


DIMENSIONS = Kind(
    f"a whole number from 0 to {_MAX_DIMENSION}, or a list of two: of inputs and of outputs",
    lambda value: (
        _is_dimension(value)
        or (isinstance(value, list) and len(value) == 2 and all(map(_is_dimension, value)))
    ),
    read=lambda value: tuple(value) if isinstance(value, list) else (value, value),
    write=lambda dims: dims[0] if dims[0] == dims[1] else list(dims),
)


def gpu_numbers(gpus: int) -> Kind:
    """Return the kind of lists of GPU numbers; an empty list means all GPUs."""
    kind = _list_of(f"a list of GPU numbers from 0 to {gpus - 1}", 0, gpus - 1)
    return replace(kind, read=lambda value: tuple(value) or None)


def numbers_of(*names: str) -> Kind:
    """Return the kind of maps from names to whole numbers, read by position of the name."""

    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and all(
            key in names and is_whole(number, 1) for key, number in value.items()
        )

    return Kind(
        f"a map of {', '.join(names)} to whole numbers, 1 or more",
        accepts,
        read=lambda value: {names.index(name): number for name, number in value.items()},
        write=lambda value: {names[place]: number for place, number in value.items()},
    )


def flag_or(kind: Kind, rule: str, read: Callable[[Any], Any] = _unchanged) -> Kind:
    """Return the kind of a switch or of another kind."""
    return Kind(rule, lambda value: type(value) is bool or kind.accepts(value), read=read)


def positive_numbers(names: Container[str]) -> Kind:
    """Return the kind of maps from these names to numbers above 0."""

    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and all(
            key in names and type(number) in (int, float) and 0 < number <= MAX_NUMBER
            for key, number in value.items()
        )

    return Kind("numbers above 0", accepts)
