"""What becomes of the outputs of a workflow's leaves."""

import json

import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.errors import ServeError
from marserve.frontend.workflows.workflow import answer_of


def joined(**outputs: Prediction) -> Prediction:
    steps = answer_of(outputs)
    try:
        while True:
            next(steps)
    except StopIteration as finished:
        answer: Prediction = finished.value
        return answer


def test_one_output_stays_as_it_is():
    answer = joined(leaf=Prediction(b"\xff", 201, "Made", {"X-Mine": "1"}))
    assert (bytes(answer.body), answer.status, answer.reason) == (b"\xff", 201, "Made")
    assert answer.headers == {"content-type": "application/json", "X-Mine": "1"}


@pytest.mark.parametrize("name", ["content-type", "Content-Type"])
def test_a_type_that_the_handler_has_set_stays(name):
    assert joined(leaf=Prediction(b"", headers={name: "a/b"})).headers == {name: "a/b"}


@pytest.mark.parametrize(("status", "reason"), [(200, "OK"), (404, "Not Found"), (299, "")])
def test_the_phrase_is_the_standard_one(status, reason):
    assert joined(leaf=Prediction(b"", status)).reason == reason


def test_several_outputs_are_members_in_order():
    answer = joined(
        b=Prediction(b' {"x": 1}\n'), a=Prediction(b"plain \xc3\xa4"), c=Prediction(b"[1, null]")
    )
    assert json.loads(bytes(answer.body)) == {"b": {"x": 1}, "a": "plain \u00e4", "c": [1, None]}
    assert list(json.loads(bytes(answer.body))) == ["b", "a", "c"]
    assert (answer.status, answer.reason) == (200, "OK")


def test_an_output_that_is_no_text_cannot_be_a_member():
    with pytest.raises(ServeError, match="The output of a is neither JSON nor text"):
        joined(a=Prediction(b"\xff"), b=Prediction(b"{}"))


def test_deep_json_is_a_text():
    answer = joined(a=Prediction(b"[" * 100_000), b=Prediction(b"{}"))
    assert json.loads(bytes(answer.body))["a"] == "[" * 100_000
