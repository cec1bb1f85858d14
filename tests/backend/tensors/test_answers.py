import json
from typing import Any

import numpy as np
import pytest

from marserve.backend.protocol import Input
from marserve.backend.tensors.answers import AnswerFormat, UnknownOutput
from marserve.backend.tensors.datatypes import UnusableTensor
from marserve.backend.tensors.wire import FORMAT_HEADER, IN_BODY, SIZE

DOCUMENT = {"outputs": [{"name": "y", "datatype": "FP16", "shape": [2, 1], "data": [[1], [2.5]]}]}
FORM = {"id": "7", "model_name": "m", "model_version": "1"}


def form_of(head: Any) -> AnswerFormat | None:
    text = json.dumps({**FORM, **head} if isinstance(head, dict) else head)
    return AnswerFormat.of(Input("1", {FORMAT_HEADER: text}, []), {})


def test_the_answer_has_what_was_asked_for():
    asked = [{"name": "b"}, {"name": "a", "parameters": {"binary_data": False}}]
    form = form_of({"id": "7", "parameters": {"binary_data_output": True}, "outputs": asked})
    assert form is not None
    body, end = form.encode({name: np.int32([1]) for name in "abc"})
    assert body[:end].count(b"\n") == 1
    assert json.loads(body[:end]) == {
        **FORM,
        "outputs": [
            {"name": "b", "datatype": "INT32", "shape": [1], "parameters": {SIZE: 4}},
            {"name": "a", "datatype": "INT32", "shape": [1], "data": [1]},
        ],
    }
    assert body[end:] == b"\1\0\0\0"
    with pytest.raises(UnknownOutput, match="no output 'b'; the handler gave c"):
        form.encode({"c": np.int32([1])})


def test_an_output_without_a_name_has_the_one_asked_for():
    form = form_of({"outputs": [{"name": "mine"}]})
    assert form is not None
    assert json.loads(form.encode([1])[0])["outputs"][0]["name"] == "mine"


def test_the_handlers_own_members_are_kept():
    form = form_of({"id": "7"})
    assert form is not None
    result = {**DOCUMENT, "id": "8", "model_name": "x", "parameters": {"a": 1}}
    answer = json.loads(form.encode(result)[0])
    del answer["outputs"]
    assert answer == {**FORM, "id": "8", "model_name": "x", "parameters": {"a": 1}}


def test_bytes_go_into_json_only_as_text():
    form = form_of({})
    assert form is not None
    with pytest.raises(UnusableTensor, match="request it as binary data"):
        form.encode(b"\xff")


@pytest.mark.parametrize("text", ["", "[1]", "{}", "5", "[" * 9999, json.dumps({"id": "7"})])
def test_a_clients_own_header_of_that_name_costs_nobody_an_answer(text):
    assert AnswerFormat.of(Input("1", {FORMAT_HEADER: text}, []), {}) is None


@pytest.mark.parametrize("head", [{"outputs": 5}, {"outputs": [{}]}, {"outputs": ["a"]}])
def test_outputs_that_are_none_ask_for_all(head):
    form = form_of(head)
    assert form is not None
    assert len(json.loads(form.encode({"a": np.ones(1), "b": np.ones(1)})[0])["outputs"]) == 2


@pytest.mark.parametrize("result", [1.0, {"outputs": [{"data": [1.0]}]}, np.ones(1)])
def test_a_single_declared_output_has_its_name(result):
    declared = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1]}]}
    request = Input("1", {FORMAT_HEADER: json.dumps(FORM)}, [])
    form = AnswerFormat.of(request, {}, declared)
    assert form is not None
    assert [output["name"] for output in json.loads(form.encode(result)[0])["outputs"]] == ["y"]
    request = Input("1", {FORMAT_HEADER: json.dumps({**FORM, "outputs": [{"name": "z"}]})}, [])
    form = AnswerFormat.of(request, {}, declared)
    assert form is not None
    with pytest.raises(UnknownOutput, match="no output 'z'; the handler gave y"):
        form.encode(result)


def test_the_format_may_be_in_the_body():
    request = Input("1", {FORMAT_HEADER: json.dumps({**FORM, IN_BODY: True})}, [])
    form = AnswerFormat.of(request, {"body": {"id": "9"}})
    assert form is not None
    assert json.loads(form.encode(1)[0])["id"] == "9"
    for body in (b"no JSON", None, [1], {"parameters": 5}):
        form = AnswerFormat.of(request, {"body": body})
        assert form is not None
        assert json.loads(form.encode(1)[0])["id"] == "7"
