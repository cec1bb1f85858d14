import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.profiling.comparison import compare
from marserve.backend.profiling.validation import arrangements


def difference(first: Any, second: Any, tolerance: float = 1e-3) -> tuple[float, str]:
    found = compare(json.dumps(first).encode(), json.dumps(second).encode(), tolerance)
    return found.largest, found.what


@pytest.mark.parametrize(
    ("first", "second", "largest"),
    [
        (1.0, 1.0, 0),
        (1.0, 1, 0),
        (0.5, 0.5005, 0.0005),
        ([0.25], [0.2501], 0.0001),
        ({"a": 1000.0}, {"a": 1000.5}, 0.0005),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, 0),
        (math.nan, math.nan, 0),
        (math.inf, math.inf, 0),
    ],
)
def test_what_is_tolerated(first, second, largest):
    found, what = difference(first, second)
    assert found == pytest.approx(largest, rel=0.01)
    assert what == ""


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (0.5, 0.51, "the number: 0.5 and 0.51"),
        (1_000_000_001, 1_000_000_000, "the answer: 1000000001 and 1000000000"),
        ({"p": [1, 0.5]}, {"p": [1, 0.6]}, "p[1]: 0.5 and 0.6"),
        ({"a": 1}, {"b": 1}, "the members: ['a'] and ['b']"),
        ({"p": [1]}, {"p": [1, 2]}, "the length of p: 1 and 2"),
        (True, 1, "the answer: True and 1"),
        ("cat", "dog", "the answer: cat and dog"),
        (None, 0, "the answer: None and 0"),
        (math.nan, 1.0, "the number: nan and 1.0"),
        (math.inf, 1.0, "the number: inf and 1.0"),
        ("x" * 100, "", f"the answer: {'x' * 40}... and "),
    ],
)
def test_what_is_not(first, second, told):
    largest, what = difference(first, second)
    assert what == told
    assert 0 <= largest <= 2  # can be shown as JSON


@pytest.mark.parametrize("body", [b"\xff\x00", b"plain", b"[" * 100_000, b"9" * 5000])
def test_what_is_no_json_is_compared_byte_by_byte(body):
    assert compare(body, bytearray(body), 0.1).what == ""
    told = compare(body, body + b"!", 0.1).what
    assert told == f"{len(body)} bytes and {len(body) + 1} bytes that are not the same"


def test_a_number_that_no_float_can_be_is_compared_byte_by_byte():
    assert difference([10**400], [1.5]) == (0, "403 bytes and 5 bytes that are not the same")


@given(st.integers(1, 40), st.integers(2, 5))
def test_arrangements_tell_all_places_apart_and_have_all_samples_at_each(size, samples):
    found = list(arrangements(size, samples))
    assert {len(each) for each in found} == {size}
    for first, second in itertools.combinations(range(size), 2):
        assert any(each[first] != each[second] for each in found)
    for place in range(size):
        assert {each[place] for each in found} == set(range(samples))
    assert len(found) <= samples * max(1, math.ceil(math.log(size, samples) + 1e-9))
