"""JSON documents: as Python's own writer makes them, in steps, without null members."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from steps import result_of

from marserve.frontend.documents import JsonText, json_steps, json_text

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@given(values)
def test_a_document_is_written_as_python_does_without_null_members(document):
    expected = json.dumps(without_nulls(document), indent=2, ensure_ascii=False) + "\n"
    assert json_text(document) == expected
    assert result_of(json_steps(document)).decode(errors="replace") == expected
    compact = json.dumps(without_nulls(document), separators=(",", ": "), ensure_ascii=False)
    assert result_of(json_steps(document, indented=False)).decode() == compact


def test_a_large_document_is_made_while_it_is_written_and_its_bytes_are_counted():
    made = []

    def items():
        for number in range(10_000):
            made.append(number)
            yield {"number": number}

    steps, counted = json_steps({"items": items()}), list[int]()
    counted.append(next(steps))
    assert len(made) < 200
    text = result_of(steps, counted.append)
    assert json.loads(text) == {"items": [{"number": number} for number in range(10_000)]}
    assert sum(counted) <= len(text) < sum(counted) + 10_000
    assert max(counted) < 20_000


def test_what_is_json_already_is_not_written_again():
    assert json_text([JsonText('{"a":[1, 2]}')]) == '[\n  {"a":[1, 2]}\n]\n'
