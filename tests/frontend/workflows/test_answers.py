"""The one answer of several leaves."""

import json

import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.errors import ServeError
from marserve.frontend.workflows.answers import answer_of


def joined(**bodies: bytes) -> Prediction:
    steps = answer_of({name: Prediction(body) for name, body in bodies.items()})
    while True:
        try:
            next(steps)
        except StopIteration as done:
            answer: Prediction = done.value
            return answer


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b' {"a": [1]} ', {"a": [1]}),
        (b"plain", "plain"),
        (b"", ""),
        ("\u00e9\n".encode(), "\u00e9\n"),
        (b"NaN", "NaN"),
        (b"[-Infinity, 1]", "[-Infinity, 1]"),
        (b"9" * 5000, "9" * 5000),
        (b"[" * 100_000, "[" * 100_000),
    ],
)
def test_whatever_leaves_say_the_answer_is_json(body: bytes, value: object) -> None:
    answer = joined(one=body, other=b"1")
    assert json.loads(bytes(answer.body), parse_constant=refuse) == {"one": value, "other": 1}


def test_what_is_no_text_cannot_be_a_member() -> None:
    with pytest.raises(ServeError, match="output of one is neither JSON nor text"):
        joined(one=b"\xff", other=b"1")
