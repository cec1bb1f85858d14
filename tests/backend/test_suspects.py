import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from marserve.backend.suspects import suspect_of

Handler = Callable[[list[dict[str, Any]]], Any]


def suspect(handler: Handler, rows: Sequence[dict[str, Any]], count: int = 0) -> int:
    """The place that the traceback names when the handler raises for these rows."""
    return blamed(handler, rows, count)[0]


def blamed(handler: Handler, rows: Sequence[dict[str, Any]], count: int = 0) -> tuple[int, str]:
    try:
        handler([*rows])
    except (ValueError, KeyError, ZeroDivisionError) as error:
        return suspect_of(error, rows, count or len(rows))
    raise AssertionError("it did not raise")


def rows_of(*bodies: Any) -> list[dict[str, Any]]:
    return [{"body": body} for body in bodies]


def check(body: str) -> None:
    if body == "bad":
        raise ValueError(body)


def in_a_loop(data: list[dict[str, Any]]) -> None:
    for row in data:
        check(row["body"])


def in_the_loop_itself(data: list[dict[str, Any]]) -> None:
    for number, row in enumerate(data):
        float(row["body"] == "bad" or number) / (row["body"] != "bad")


def in_a_comprehension(data: list[dict[str, Any]]) -> list[None]:
    return [check(row["body"]) for row in data]


def in_a_generator(data: list[dict[str, Any]]) -> bool:
    return any(check(row["body"]) for row in data)


def by_map(data: list[dict[str, Any]]) -> list[None]:
    return list(map(check_row, data))


def check_row(row: dict[str, Any]) -> None:
    check(row["body"])


def by_value(data: list[dict[str, Any]]) -> None:
    for body in [row["body"] for row in data]:
        check(body)


def in_threads(data: list[dict[str, Any]]) -> list[None]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda row: check(row["body"]), data))


def from_a_copy_that_was_emptied(data: list[dict[str, Any]]) -> None:
    while data:
        row = data.pop()
        check(row["body"])


def with_another_row_further_out(data: list[dict[str, Any]]) -> None:
    first = data[0]
    for row in data:
        check(row["body"])
    del first


def chained(data: list[dict[str, Any]]) -> None:
    for row in data:
        try:
            check(row["body"])
        except ValueError as error:
            raise KeyError("no such class") from error


@pytest.mark.parametrize(
    "handler",
    [
        in_a_loop,
        in_the_loop_itself,
        in_a_comprehension,
        in_a_generator,
        by_map,
        by_value,
        in_threads,
        from_a_copy_that_was_emptied,
        with_another_row_further_out,
        chained,
    ],
)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_the_row_that_a_handler_was_busy_with_is_named(handler, place):
    bodies = ["one", "two", "three", "four"]
    bodies[place] = "bad"
    assert suspect(handler, rows_of(*bodies)) == place


def all_at_once(data: list[dict[str, Any]]) -> None:
    bodies = [row["body"] for row in data]
    if "bad" in bodies:
        raise ValueError


def two_at_a_time(data: list[dict[str, Any]]) -> None:
    for row, other in itertools.pairwise(data):
        check(row["body"] if row else other["body"])


def deep(data: list[dict[str, Any]], depth: int = 300) -> None:
    if not depth:
        raise ValueError
    deep(data, depth - 1)


@pytest.mark.parametrize("handler", [all_at_once, deep])
def test_where_no_single_row_is_held_nobody_is_named(handler):
    assert blamed(handler, rows_of("one", "bad", "three")) == (-1, "")


def test_a_value_that_rows_share_names_nobody():
    assert suspect(by_value, rows_of("one", *["bad"] * 2)) == -1


def test_the_innermost_frame_with_one_row_counts():
    assert suspect(two_at_a_time, rows_of("one", "bad", "three")) == 1


def test_padding_speaks_for_the_row_it_repeats():
    rows = [*rows_of("one", "two"), {"body": "bad"}]
    assert suspect(in_a_loop, rows, 2) == 1


def test_where_it_was_raised_is_told_by_file_line_and_type():
    _, first = blamed(in_a_loop, rows_of("bad", "two"))
    _, again = blamed(in_a_loop, rows_of("one", "two", "bad"))
    _, other = blamed(chained, rows_of("bad", "two"))
    assert first == again != other
    assert other.endswith("KeyError")
    raised, named, kind = first.split()
    assert raised.startswith("test_suspects.py:")
    assert named.startswith("test_suspects.py:")
    assert kind == "ValueError"


class Hostile:
    """Objects of a handler, whose comparison is its code."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None


def test_objects_of_the_handler_are_not_compared():
    def handler(data):
        for row in data:
            row["mine"] = Hostile()
            item = row["mine"]
            check(row["body"])
            del item

    assert suspect(handler, rows_of("one", "bad")) == 1


class HostileNames(dict[str, Any]):
    """Names of code that a handler executes."""

    def values(self) -> Any:
        raise AssertionError("looked into")


def test_names_of_executed_code_are_not_looked_into():
    def handler(data):
        exec("1 / 0", {}, HostileNames(row=data[0]))

    with pytest.raises(ZeroDivisionError) as raised:
        handler(rows := rows_of("one", "two"))
    assert suspect_of(raised.value, rows, 2) == (-1, "")


class Large:
    """What a handler holds while it raises."""


def test_nothing_of_the_handler_is_kept():
    kept = []

    def handler(data):
        tensor = Large()
        kept.append(weakref.ref(tensor))
        in_a_loop(data)

    gc.disable()
    try:
        assert suspect(handler, rows_of("one", "bad")) == 1
        assert kept[0]() is None
    finally:
        gc.enable()
