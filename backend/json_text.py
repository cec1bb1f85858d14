"""JSON of handlers' results, which may have numbers that JSON does not have: NaN and infinities."""

import json
import math
from collections.abc import Callable
from typing import Any

#: The values of ``json_nan``: such numbers are written as Python does (as in TorchServe and
#: Triton), as null, or refused.
KEEP, NULL, REFUSE = JSON_NAN = ("keep", "null", "refuse")
_MAX_PLACE = 200


class NotJson(ValueError):
    """A result has a number that JSON does not have, which is refused."""

    def __init__(self, subject: str) -> None:
        super().__init__(
            f"{subject}, and JSON has no NaN and no infinite numbers (json_nan={REFUSE})."
        )


def _unknown(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def to_json(
    value: Any,
    json_nan: str = KEEP,
    *,
    indent: int | None = None,
    default: Callable[[Any], Any] = _unknown,
    name: str = "prediction",
) -> str:
    """Return a value as JSON; ``default`` converts what `json` does not know.

    Raises:
        NotJson: A number is not finite, and such are refused.
        TypeError: The value cannot be written.
        ValueError: It contains itself.
    """
    if json_nan == KEEP:
        return json.dumps(value, indent=indent, default=default)
    try:
        return json.dumps(value, indent=indent, default=default, allow_nan=False)
    except ValueError as error:
        if "float" not in str(error):  # it contains itself
            raise
    if json_nan == REFUSE:
        raise NotJson(_first(value, name, default) or f"{name} has a number that is not finite")
    return json.dumps(_with_nulls(value, default), indent=indent, default=default, allow_nan=False)


def with_nulls(numbers: list[Any]) -> list[Any]:
    """Return numbers, with None for those that are not finite."""
    return [number if math.isfinite(number) else None for number in numbers]


def _with_nulls(value: Any, default: Callable[[Any], Any]) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        members = value.items()
        return {_key(key): _with_nulls(member, default) for key, member in members}
    if isinstance(value, list | tuple):
        return [_with_nulls(item, default) for item in value]
    return _with_nulls(default(value), default)


def _key(key: Any) -> Any:
    """Return a key; one that is not finite as the text that it is without ``allow_nan=False``."""
    is_odd = isinstance(key, float) and not math.isfinite(key)
    return json.dumps(key) if is_odd else key


def _first(value: Any, place: str, default: Callable[[Any], Any]) -> str:
    """Describe the first number that is not finite; empty if there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{place[:_MAX_PLACE]} is {json.dumps(value)}"
    if value is None or isinstance(value, str | int):
        return ""
    if not isinstance(value, dict | list | tuple):
        return _first(default(value), place, default)
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(key, float) and not math.isfinite(key):
            return f"{place[:_MAX_PLACE]} has the key {json.dumps(key)}"
        if found := _first(member, f"{place}[{json.dumps(key)}]", default):
            return found
    return ""
