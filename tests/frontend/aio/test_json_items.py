"""The items of a long JSON list, found without parsing all of it."""

import json
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import result_of

from marserve.frontend.aio import json_items as tested
from marserve.frontend.aio.json_items import (
    UNREADABLE,
    JsonItems,
    check_json,
    json_items,
    load_utf8,
    object_members,
)

MANY = 1000
T = TypeVar("T")

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text('ab"\\[]{},é'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[,'), inner),
    max_leaves=12,
)


@pytest.fixture(autouse=True)
def everything_is_long(monkeypatch):
    """The windows are small, so that the texts of the tests are long."""
    monkeypatch.setattr(tested, "SMALL_BYTES", 16)
    monkeypatch.setattr(tested, "_WINDOW", 6)  # as long as an escape
    monkeypatch.setattr(tested, "_TOKENS", 2)


def found_in(body: bytes, max_items: int = MANY) -> JsonItems | None:
    return result_of(json_items(body, max_items))


def padded(document: Any, indent: int | None) -> bytes:
    return b" \n" * 5 + json.dumps(document, indent=indent).encode() + b"\t" * 5


@given(items=st.lists(values), indent=st.sampled_from([None, 0, 2]))
def test_the_items_are_those_that_a_parser_finds(items, indent):
    found = found_in(padded(items, indent))
    assert found is not None
    assert not found.are_instances
    assert repr([json.loads(bytes(text)) for text in found.texts]) == repr(items)


@given(before=st.dictionaries(st.text(), values), items=st.lists(values), after=st.lists(st.text()))
def test_instances_are_found_among_other_members(before, items, after):
    document = {**before, "instances": items, **{f"{name}!": name for name in after}}
    found = found_in(padded(document, None))
    assert found is not None
    assert found.are_instances
    assert repr([json.loads(bytes(text)) for text in found.texts]) == repr(items)


@given(st.binary(max_size=40) | st.text('[]{},:"\\ 1a', max_size=40).map(str.encode))
def test_whatever_comes_it_ends(body):
    found = found_in(body)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return  # malformed inside of a long item: left to whoever reads it
    items = document.get("instances") if isinstance(document, dict) else document
    assert (found is not None) == isinstance(items, list)


@pytest.mark.parametrize(
    "body",
    [
        b"[1, 2, 3, 4",
        b'["a long text',
        b'["a long text\\',
        b"[1, 2, 3, 4] x",
        b"[1, 2, 3, 4}",
        b"[1, 2,, 3, 4]",
        b"[1, 2, 3, 4,]",
        b'{"instances": [1]} x',
        b'{"instances": [1], x}',
        b'{"instances": "text"}',
        b'{"inputs": [1, 2, 3]}',
        b'"nothing but a text"',
        b"[" * 2000 + b"]" * 2000,
    ],
)
def test_anything_else_is_no_list(body):
    assert found_in(body) is None


def test_a_list_is_not_looked_at_behind_as_many_items_as_are_wanted():
    found = found_in(b"[1, [2], 3, 4 garbage", 3)
    assert found is not None
    assert found.texts == [b"1", b"[2]", b"3"]


def test_a_list_of_any_size_is_searched_in_small_steps(monkeypatch):
    monkeypatch.undo()
    body = b"[[" + b"[]," * 1_000_000 + b"1]]"
    assert sum(1 for _ in json_items(body, MANY)) >= 1_000_000 // 256


# -- all of a text ---------------------------------------------------------------------------------


def is_json(text: str) -> bool:
    try:
        start, stop = result_of(check_json(text.encode(), load_utf8))
    except UNREADABLE:
        return False
    assert text.encode()[start:stop] == text.encode().strip(b" \t\n\r")
    return True


@given(document=values, indent=st.sampled_from([None, 0, 2]), is_ascii=st.booleans())
def test_what_a_parser_has_written_is_json(document, indent, is_ascii):
    assert is_json(f" {json.dumps(document, indent=indent, ensure_ascii=is_ascii)}\n")


tokens = st.sampled_from(["[", "]", "{", "}", ",", '"a":', "1", '"x"', '"\\u00"', " "])


@given(st.text('[]{},:"\\ 1aé\n', max_size=40) | st.lists(tokens, max_size=12).map("".join))
def test_other_text_is_json_if_it_is_for_a_parser(text):
    try:
        json.loads(text)
    except UNREADABLE:
        assert not is_json(text)
    else:
        assert is_json(text)


def test_json_that_is_nested_too_deeply_is_refused():
    assert not is_json("[" * 5000 + "]" * 5000)


# -- members of an object --------------------------------------------------------------------------


NAMES = ("a", '"', "\u00e9", "\\")


@given(document=st.dictionaries(st.sampled_from(NAMES) | st.text(), values, min_size=1))
def test_the_members_are_those_that_a_parser_finds(document):
    body = padded(document, None)
    found = result_of(object_members(body, NAMES))
    expected = {name: value for name, value in document.items() if name in NAMES}
    values = {name: json.loads(body[start:stop]) for name, (start, stop) in found.items()}
    assert repr(values) == repr(expected)


@given(st.binary(max_size=40) | st.text('{}[],:"\\ a1', max_size=40).map(str.encode))
def test_what_is_no_object_has_no_members(body):
    try:
        is_object = isinstance(json.loads(body), dict)
    except UNREADABLE:
        is_object = False
    try:
        result_of(object_members(body, ("a",)))
    except UNREADABLE:
        assert not is_object or json.loads(body) == {}


@pytest.mark.parametrize("body", [b"{}", b"[]", b'"a"', b'{"a": 1', b'{"a": 1]', b'{"a": 1} x'])
def test_other_bodies_are_not_read(body):
    with pytest.raises(UNREADABLE):
        result_of(object_members(body, ("a",)))


def test_an_object_of_any_size_is_searched_in_small_steps(monkeypatch):
    monkeypatch.undo()
    body = b'{"messages": [' + b"[]," * 200_000 + b'1], "model": "m"}'
    assert sum(1 for _ in object_members(body, ("model",))) >= 200_000 // 256
