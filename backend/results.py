"""What a handler returned for one request, as the body of its answer."""

import io
import json
import sys
from typing import Any

from marserve.backend.protocol import Buffer

_MAX_PLACE = 200
_MAX_KEY = 40


def encode_result(result: Any) -> Buffer:
    """The body of one result: bytes raw, str as UTF-8, a tensor as ``torch.save``, else JSON.

    In JSON, numpy's scalars are numbers, its arrays lists, and tensors of one element numbers.

    Raises:
        TypeError, ValueError: The result is none of these; see `describe_unsendable`.
    """
    if isinstance(result, bytes | bytearray):
        return result
    if isinstance(result, str):
        return str.encode(result)  # str's own: a subclass may have another
    torch = sys.modules.get("torch")  # a tensor exists only where torch was imported
    if torch is not None and isinstance(result, torch.Tensor):
        file = io.BytesIO()
        torch.save(result, file)
        return file.getvalue()
    return json.dumps(result, indent=2, default=_plain).encode()


def describe_unsendable(result: Any) -> str:
    """Why a result cannot be encoded: the place in it and what stands there, as a sentence.

    ``prediction[0]["mask"] is a torch.Tensor of 3 dimensions.`` Empty where nothing is found.
    """
    try:
        found = _unsendable(result, "prediction", ())
    except RecursionError:
        return "The prediction is nested too deeply."
    except Exception:  # noqa: BLE001 - foreign objects, which have failed once already
        return ""
    return f"{found}." if found else ""


def _plain(value: Any) -> Any:
    """What JSON can hold in place of a value.

    Raises:
        TypeError: There is nothing.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        plain = value.tolist()
        if not isinstance(plain, numpy.generic):  # longer than any number of Python's
            return plain
    elif torch is not None and isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _unsendable(value: Any, place: str, above: tuple[int, ...]) -> str:
    """The first place that JSON cannot hold, and why; empty if there is none."""
    if isinstance(value, str):
        return "" if above or _is_utf_8(value) else f"{place} is text that UTF-8 cannot encode"
    if value is None or isinstance(value, int | float):
        return ""
    if id(value) in above:
        return f"{place} contains itself"
    if isinstance(value, dict | list | tuple):
        return _unsendable_member(value, place, (*above, id(value)))
    try:
        plain = _plain(value)
    except Exception:  # noqa: BLE001 - a tensor without data, say
        return f"{place} is {_kind(value)}"
    return _unsendable(plain, place, (*above, id(value)))


def _unsendable_member(value: Any, place: str, above: tuple[int, ...]) -> str:
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        if key is not None and not isinstance(key, str | int | float):
            return f"{place} has a key that is {_kind(key)}"
        if found := _unsendable(member, _shortened(f"{place}[{_formatted_key(key)}]"), above):
            return found
    return ""


def _is_utf_8(text: str) -> bool:
    try:
        str.encode(text)
    except UnicodeEncodeError:
        return False
    return True


def _formatted_key(key: Any) -> str:
    text = json.dumps(key)
    return text if len(text) <= _MAX_KEY else f'{text[:_MAX_KEY]}…"'


def _shortened(place: str) -> str:
    """A place of bearable length: the beginning and the end of it."""
    if len(place) <= _MAX_PLACE:
        return place
    half = _MAX_PLACE // 2
    return f"{place[:half]}…{place[-half:]}"


def _kind(value: Any) -> str:
    """The type of a value, with its article."""
    kind = type(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        count = value.dim()
        return f"a torch.Tensor of {count} dimension{'' if count == 1 else 's'}"
    if kind.__module__ == "builtins":
        return f"of type {kind.__qualname__}"
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
