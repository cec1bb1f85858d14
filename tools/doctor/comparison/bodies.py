"""Comparison of bodies: JSON, texts with numbers, multipart bodies, bytes."""

import contextlib
import json
import re
from collections.abc import Container, Sequence
from typing import Any

from marserve.backend.profiling.comparison import Difference, compare
from marserve.tools.bench.client import MAX_PARSED, Answer
from marserve.tools.doctor.comparison.forms import parts

# Limited, because Python refuses to convert thousands of digits.
_NUMBER = re.compile(r"[-+]?(?:\d{1,300}\.?\d{0,300}|\.\d{1,300})(?:[eE][-+]?\d{1,5})?")
_AROUND = 20  # characters shown on both sides of a difference


def compare_bodies(
    old: Answer, new: Answer, tolerance: float, ignored: Container[str] = ()
) -> Difference:
    """Return the difference between the bodies of two responses.

    Args:
        old: The reference.
        new: The response to compare.
        tolerance: Allowed difference of numbers, as in `marserve.backend.profiling.comparison`.
        ignored: Members of JSON objects, at any depth, that are not compared.
    """
    if old.body == new.body:
        return Difference()
    if max(len(old.body), len(new.body)) > MAX_PARSED:
        return Difference(what=_first_byte(old.body, new.body))
    types = (old.headers.get("content-type", ""), new.headers.get("content-type", ""))
    several = parts(old.body, types[0]), parts(new.body, types[1])
    if several[0] is not None and several[1] is not None:
        return _compare_parts(several[0], several[1], tolerance, ignored)
    return _compare(old.body, new.body, tolerance, ignored)


def _compare_parts(
    old: list[tuple[str, str, bytes]],
    new: list[tuple[str, str, bytes]],
    tolerance: float,
    ignored: Container[str],
) -> Difference:
    heads = [[(name, kind) for name, kind, _ in each] for each in (old, new)]
    if heads[0] != heads[1]:
        return Difference(what=f"the parts: {heads[0]} and {heads[1]}")
    found = [
        (name or f"part {number}", _compare(mine[2], yours[2], tolerance, ignored))
        for number, ((name, *_), mine, yours) in enumerate(zip(old, old, new, strict=True), 1)
    ]
    what = next((f"{name}: {each.what}" for name, each in found if each.what), "")
    return Difference(max((each.largest for _, each in found), default=0.0), what)


def _compare(old: bytes, new: bytes, tolerance: float, ignored: Container[str]) -> Difference:
    documents = _json(old), _json(new)
    if None not in documents:
        with contextlib.suppress(RecursionError):
            kept = [json.dumps(_without(each[0], ignored)).encode() for each in documents if each]
            return compare(kept[0], kept[1], tolerance)
    texts = _text(old), _text(new)
    if texts[0] is not None and texts[1] is not None:
        return _compare_texts(texts[0], texts[1], tolerance)
    return Difference(what=_first_byte(old, new))


def _json(body: bytes) -> tuple[Any] | None:
    try:
        return (json.loads(body),)
    except (ValueError, RecursionError):
        return None


def _without(value: Any, ignored: Container[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(of, ignored) for key, of in value.items() if key not in ignored}
    return [_without(each, ignored) for each in value] if isinstance(value, list) else value


def _text(body: bytes) -> str | None:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _compare_texts(old: str, new: str, tolerance: float) -> Difference:
    """Compare numbers within the tolerance, as of a printed tensor, and all else exactly."""
    if _NUMBER.split(old) != _NUMBER.split(new):
        start = _first_difference(old, new) or 0
        shown = [repr(each[max(0, start - _AROUND) : start + _AROUND]) for each in (old, new)]
        return Difference(what=f"the text: {shown[0]} and {shown[1]}")
    return compare(_numbers(old), _numbers(new), tolerance)


def _numbers(text: str) -> bytes:
    return json.dumps([_number(each) for each in _NUMBER.findall(text)]).encode()


def _number(text: str) -> float:
    return float(text) if any(sign in text for sign in ".eE") else int(text)


def _first_byte(old: bytes, new: bytes) -> str:
    sizes = f"{len(old)} bytes" if len(old) == len(new) else f"{len(old)} and {len(new)} bytes"
    at = _first_difference(old, new)
    return f"{sizes} that " + (
        "are the same until one ends" if at is None else f"differ from byte {at} on"
    )


def _first_difference(old: Sequence[object], new: Sequence[object]) -> int | None:
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (mine, yours) in pairs if mine != yours), None)
