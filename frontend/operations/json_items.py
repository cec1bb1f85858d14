"""Finds the items of a JSON list, without keeping the event loop from anything else.

Python's parser cannot be interrupted: it takes 0.2 s for the brackets of 6 MB. So only small texts
and small items go through it. Of larger ones it is only found out where the items begin and end; a
large item that is malformed inside is left to whoever reads it.
"""

import json
import re
import sys
from typing import NamedTuple

from marserve.frontend.aio.long_work import Steps

#: What makes a text or an item no JSON.
UNREADABLE = (ValueError, RecursionError)

_SMALL_BYTES = 1 << 16
# One step searches so many bytes, or finds so many tokens.
_WINDOW = 1 << 16
_TOKENS = 256
_MAX_DEPTH = 900  # about where Python's parser gives up
_OPENING, _CLOSING, _COMMA = (b"[", b"{"), (b"]", b"}"), b","
_OUTER = re.compile(rb'["\[\]{},]')
# Inside of brackets commas end nothing, nor do brackets with nothing but numbers between them.
_INNER = re.compile(rb'[\[{][^"\[\]{}]*+[\]}]|["\[\]{}]')
_TEXT = re.compile(rb'(?:[^"\\]++|\\.)++', re.DOTALL)
_BLANKS = re.compile(rb"[ \t\n\r]*")
_KEY = re.compile(rb'[ \t\n\r]*("(?:[^"\\]++|\\.)*+")[ \t\n\r]*:[ \t\n\r]*', re.DOTALL)

_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class JsonItems(NamedTuple):
    """The items of a list, each as JSON."""

    texts: list[bytes]
    are_instances: bool  # whether they are the member ``instances`` of an object


def json_items(body: bytes, max_items: int) -> Steps[JsonItems | None]:
    """The items of an array, or of an array ``instances`` in an object; None for anything else.

    Behind ``max_items`` the rest of a long list may be malformed, as it is not looked at.
    """
    try:
        if len(body) <= _SMALL_BYTES:
            return _items_of(json.loads(body), max_items)
        return (yield from _find_items(body, max_items))
    except UNREADABLE:
        return None


def _items_of(document: object, max_items: int) -> JsonItems | None:
    are_instances = isinstance(document, dict)
    if isinstance(document, dict):
        document = document.get("instances")
    if not isinstance(document, list):
        return None
    return JsonItems([_to_json(item).encode() for item in document[:max_items]], are_instances)


def _find_items(body: bytes, max_items: int) -> Steps[JsonItems | None]:
    at = _skip_blanks(body, 0)
    are_instances = body.startswith(b"{", at)
    if are_instances:
        at, _, end = yield from find_member(body, at, "instances")
        _check_end(body, end)
    if not body.startswith(b"[", at):
        return None
    texts, end = yield from items_at(body, at, max_items)
    if not are_instances and len(texts) < max_items:
        _check_end(body, end)
    return JsonItems(texts, are_instances)


def items_at(body: bytes, at: int, max_items: int = sys.maxsize) -> Steps[tuple[list[bytes], int]]:
    """The items of the array that begins at a place, and where it ends if they are not so many.

    Raises:
        ValueError, RecursionError: It is malformed; large items, and the rest, are not looked at.
    """
    texts: list[bytes] = []
    while len(texts) < max_items:
        start = at + 1
        at = yield from _end_of_value(body, start)
        text = body[start:at].strip()
        if not body.startswith(_COMMA, at) and not text and not texts:
            break
        if len(text) <= _SMALL_BYTES:
            json.loads(text)
        texts.append(text)
        if not body.startswith(_COMMA, at):
            break
        yield
    else:
        return texts, at
    if not body.startswith(b"]", at):
        raise ValueError("the list does not end")
    return texts, at


def find_member(body: bytes, at: int, name: str) -> Steps[tuple[int, int, int]]:
    """Where the value of the last member of that name begins and ends; and the object's end.

    Without such a member both are where the object begins.
    """
    start = stop = at
    while True:
        key = _KEY.match(body, at + 1)
        if key is None:
            raise ValueError("an object has a member without a key")
        is_found = len(key[1]) <= _SMALL_BYTES and json.loads(key[1]) == name
        at = yield from _end_of_value(body, key.end())
        if is_found:
            start, stop = key.end(), at
        if not body.startswith(_COMMA, at):
            return start, stop, at
        yield


def _end_of_value(body: bytes, start: int) -> Steps[int]:
    """Where the comma or bracket is that ends the value which begins at ``start``."""
    depth, at, count = 0, start, 0
    while at < len(body) and depth <= _MAX_DEPTH:
        found = (_INNER if depth else _OUTER).search(body, at, at + _WINDOW)
        count += 1
        if found is None or count % _TOKENS == 0:
            yield
        if found is None:
            at += _WINDOW
            continue
        at = found.end()
        if found[0] == b'"':
            at = yield from _end_of_text(body, at)
        elif found[0] in _OPENING:
            depth += 1
        elif not depth:
            return found.start()
        elif found[0] in _CLOSING:
            depth -= 1
    raise ValueError("a value does not end, or is nested too deeply")


def _end_of_text(body: bytes, at: int) -> Steps[int]:
    """Where a text ends, behind its last quote; it begins behind the first."""
    while not body.startswith(b'"', at):
        found = _TEXT.match(body, at, at + _WINDOW)
        if found is None:
            raise ValueError("a text does not end")
        at = found.end()
        yield
    return at + 1


def _skip_blanks(body: bytes, at: int) -> int:
    found = _BLANKS.match(body, at)
    assert found is not None  # it may be empty
    return found.end()


def _check_end(body: bytes, at: int) -> None:
    if _skip_blanks(body, at + 1) < len(body):
        raise ValueError("something stands behind the JSON")
