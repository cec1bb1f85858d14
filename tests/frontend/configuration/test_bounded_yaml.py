"""YAML that stands for more than it is: refused before anything is built of it."""

from typing import Any

import pytest
import yaml
from cpu_time import least_cpu_seconds
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.configuration.bounded_yaml import MAX_NODES, YamlTooLarge, load_yaml

MERGES = "a: &b0 {x: 1}\n" + "".join(
    f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 10)}]}}\n" for n in range(1, 11)
)
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
PRIME = 2**61 - 1  # what all its multiples have as hash: 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MERGES, "values"),
        (LAUGHS, "values"),
        ("a: &a {x: 1}\nb: {<<: [" + "*a," * 60_000 + "]}", "values"),
        ("[" + "1," * 500_000 + "]", "values"),
        ("[" * 10_000, "nested"),
        ("{a: " * 10_000, "nested"),
        ("- " * 500_000, "nested"),
        ("? " * 500_000, "nested"),
        ("".join(f"- &a{n} x\n" for n in range(80_000)), "anchors"),
        ("a: &a [*a]", "alias"),
        ("a: &a {<<: *a}", "alias"),
        ("a: 1" + ":1" * 200_000, "number"),
        ("a: !!int '1" + ":1" * 200_000 + "'", "number"),
        ("{" + ",".join(f"{n * PRIME}: 1" for n in range(1, 40_000)) + "}", "long"),
        ("x" * 2**20 + "y", "bytes"),
    ],
)
def test_a_bomb_is_refused_at_once(text, reason):
    def load():
        with pytest.raises(YamlTooLarge, match=reason):
            load_yaml(text)

    assert least_cpu_seconds(load, 0.5) < 0.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: &a {x: 1, y: [2, 3]}\nb: {<<: *a, x: 4}\nc: [*a, *a]\n",
        "".join(f"label_{n}: name of a class, {n}\n" for n in range(20_000)),
        "[" + ", ".join(f"0.{n:017}" for n in range(20_000)) + "]",
        "text: |\n" + "  a line of a prompt: 1:1:1\n" * 20_000,
        f"weights: {'9' * 4000}\nduration: 1:30:00\nday: 2024-02-29\nhex: 0x{'f' * 5000}",
        "!!set {a, b}",
        "a: !!binary QUJD",
    ],
)
def test_an_ordinary_document_is_what_yaml_says(text):
    expected = yaml.safe_load(text)
    assert load_yaml(text) == load_yaml(text.encode()) == expected


@pytest.mark.parametrize("text", ["a: [", "--- a\n--- b", "*nowhere", "a: !!python/name:os.sep x"])
def test_what_is_no_yaml_is_told_as_yaml_does(text):
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


@given(st.text() | st.text("[]{}*&a: -<?!\n"))
def test_whatever_is_accepted_is_no_larger_than_the_bounds(text):
    try:
        value = load_yaml(text)
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError):
        return
    assert _size(value) <= MAX_NODES


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(_size(key) + _size(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return 1 + sum(map(_size, value))
    return 1
