"""JSON documents in TorchServe's layout, which clients compare."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from marserve.frontend.aio.long_work import Steps

_PIECES = 500  # that are written in one step
_scalar = json.JSONEncoder(ensure_ascii=False).encode


class JsonText(str):
    """A member of a document that is JSON already."""

    __slots__ = ()


def json_text(document: Any) -> str:
    """Return a short JSON document as text: indented by two, without null members."""
    return "".join(_pieces(document, "\n")) + "\n"


def json_steps(document: Any, *, indented: bool = True) -> Steps[bytearray]:
    """Return a document of any size as `json_text` does, in UTF-8.

    Generators in it are written as lists, and their items are made meanwhile.
    """
    text = bytearray()
    pieces = list[str]()
    for piece in _pieces(document, "\n" if indented else ""):
        pieces.append(piece)
        if len(pieces) == _PIECES:
            before = len(text)
            text += "".join(pieces).encode("utf-8", "replace")
            pieces.clear()
            yield len(text) - before
    text += "".join(pieces).encode("utf-8", "replace")
    if indented:
        text += b"\n"
    return text


def _pieces(value: Any, line: str) -> Iterator[str]:
    """Yield the text of a value; ``line`` begins a line of it."""
    if isinstance(value, str):
        yield value if type(value) is JsonText else _scalar(value)
    elif isinstance(value, dict):
        members = (
            (f"{_scalar(key if isinstance(key, str) else _scalar(key))}: ", item)
            for key, item in value.items()
            if item is not None
        )
        yield from _listed("{}", members, line)
    elif isinstance(value, list | tuple | Iterator):
        yield from _listed("[]", (("", item) for item in value), line)
    else:
        yield _scalar(value)


def _listed(braces: str, items: Iterable[tuple[str, Any]], line: str) -> Iterator[str]:
    inner = f"{line}  " if line else ""
    start = braces[0]
    for name, item in items:
        yield f"{start}{inner}{name}"
        yield from _pieces(item, inner)
        start = ","
    yield f"{line}{braces[1]}" if start == "," else braces
