"""Compares two answers: numbers within a tolerance, everything else exactly.

Answers in JSON are compared member by member, others byte by byte. The difference of two floats is
``|a - b| / max(1, |a|, |b|)``, so that a tolerance is absolute for small numbers and relative for
large ones. Integers (classes, counts, ids), texts, and the lengths of lists are compared exactly.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from marserve.backend.protocol import Buffer

#: Default tolerances by the precision in model-config.yaml: a few steps of its mantissa, through a
#: network.
TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
_LARGEST = 2.0  # two finite numbers cannot differ more
_MAX_SHOWN = 40  # characters of a value


@dataclass(frozen=True)
class Difference:
    """The largest difference of two numbers, and the first above the tolerance; may be empty."""

    largest: float = 0.0
    what: str = ""


def compare(first: Buffer, second: Buffer, tolerance: float) -> Difference:
    """Return the difference of two answers."""
    first, second = bytes(first), bytes(second)
    if first == second:
        return Difference()
    try:
        found = _Comparison(tolerance)
        found.values(json.loads(first), json.loads(second), "")
    except (ValueError, OverflowError, RecursionError):  # not JSON
        return Difference(0.0, f"{len(first)} bytes and {len(second)} bytes that are not the same")
    return Difference(found.largest, found.what)


class _Comparison:
    def __init__(self, tolerance: float) -> None:
        self.largest = 0.0
        self.what = ""
        self._tolerance = tolerance

    def values(self, first: Any, second: Any, place: str) -> None:
        """Compare two JSON values at a place such as ``a.b[3]``."""
        of_place = f" of {place}" if place else ""
        if isinstance(first, dict) and isinstance(second, dict):
            if first.keys() != second.keys():
                self._differ(sorted(first), sorted(second), f"the members{of_place}")
                return
            for key, value in first.items():
                self.values(value, second[key], f"{place}.{key}" if place else key)
        elif isinstance(first, list) and isinstance(second, list):
            if len(first) != len(second):
                self._differ(len(first), len(second), f"the length{of_place}")
                return
            for index, (one, other) in enumerate(zip(first, second, strict=True)):
                self.values(one, other, f"{place}[{index}]")
        elif _is_number(first) and _is_number(second) and float in (type(first), type(second)):
            self._numbers(float(first), float(second), place)
        elif type(first) is not type(second) or first != second:
            self._differ(first, second, place or "the answer")

    def _numbers(self, first: float, second: float, place: str) -> None:
        if first == second or (math.isnan(first) and math.isnan(second)):
            return
        difference = abs(first - second) / max(1.0, abs(first), abs(second))
        if math.isnan(difference):  # one is not a number or is infinite
            difference = _LARGEST
        self.largest = max(self.largest, difference)
        if difference > self._tolerance:
            self._differ(first, second, place or "the number")

    def _differ(self, first: Any, second: Any, place: str) -> None:
        self.what = self.what or f"{_short(place)}: {_short(first)} and {_short(second)}"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
