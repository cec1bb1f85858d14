import numpy as np
import pytest

from marserve.handlers.request_envelope.kservev2 import KServev2Envelope


def tensor(name="x", datatype="FP32", shape=(2, 2), data=(1.0, 2.0, 3.0, 4.0), **more):
    return {"name": name, "shape": [*shape], "datatype": datatype, "data": [*data], **more}


def data_of(rows):
    return [row["data"] for row in rows]


def test_one_request_to_the_letter(ask):
    answers, _, _ = ask(
        KServev2Envelope, {"body": {"id": "mine", "inputs": [tensor()]}}, handler=data_of
    )
    assert answers == [
        {
            "id": "mine",
            "model_name": "kitten",
            "model_version": "2.1",
            "outputs": [
                {"name": "x", "datatype": "FP64", "data": [1.0, 2.0, 3.0, 4.0], "shape": [4]}
            ],
        }
    ]
    assert [*answers[0]] == ["id", "model_name", "model_version", "outputs"]
    assert [*answers[0]["outputs"][0]] == ["name", "datatype", "data", "shape"]


def test_what_the_handler_gets(ask):
    inputs = [
        tensor("numbers", parameters={"binary": False}),
        tensor("text", "BYTES", [1], ["aGk="]),
        tensor("ids", "INT64", [-1], [1, 2]),
    ]
    _, seen, context = ask(KServev2Envelope, {"body": {"inputs": inputs}}, handler=data_of)
    assert data_of(seen) == [[[1.0, 2.0], [3.0, 4.0]], "aGk=", [1, 2]]
    assert seen[0]["parameters"] == {"binary": False}
    assert context.input_names == ["numbers", "text", "ids"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"id": "a"}, "a"), ({"id": " "}, "id-0"), ({"id": ""}, "id-0"), ({}, "id-0")],
)
def test_the_id_of_an_answer(ask, values, expected):
    body = {**values, "inputs": [tensor()]}
    [answer], _, context = ask(KServev2Envelope, {"body": body}, handler=data_of)
    assert answer["id"] == expected
    assert getattr(context, "input_request_id", "id-0") == expected


def test_an_id_belongs_to_its_batch_only(ask, make_context):
    context = make_context()
    first, second = {"id": "a", "inputs": [tensor()]}, {"inputs": [tensor()]}
    ask(KServev2Envelope, {"body": first}, handler=data_of, context=context)
    [answer], _, _ = ask(KServev2Envelope, {"body": second}, handler=data_of, context=context)
    assert answer["id"] == "id-0"
    assert not hasattr(context, "input_request_id")


@pytest.mark.parametrize(
    ("result", "datatype", "shape", "data"),
    [
        (3, "INT64", [1], [3]),
        ([[1], [2]], "INT64", [2], [1, 2]),
        ([0.5], "FP64", [1], [0.5]),
        ([True, False], "BOOL", [2], [True, False]),
        ("tabby", "BYTES", [1], ["tabby"]),
        (["tabby", "tom"], "BYTES", [2], ["tabby", "tom"]),
        ({"tabby": 0.5}, "BYTES", [1], [{"tabby": 0.5}]),
        (np.float32([0.5]), "FP32", [1], [0.5]),
        (np.uint8(7), "UINT8", [1], [7]),
    ],
)
def test_results_as_outputs(ask, result, datatype, shape, data):
    [answer], _, _ = ask(
        KServev2Envelope, {"body": {"inputs": [tensor()]}}, handler=lambda rows: [result]
    )
    assert answer["outputs"] == [{"name": "x", "datatype": datatype, "data": data, "shape": shape}]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ([], {"a": [1], "b": [2]}),
        (["b"], {"b": [2]}),
        (["b", "a"], {"b": [2], "a": [1]}),
        (["scores"], {"scores": [1]}),
        (["scores", "labels"], {"scores": [1], "labels": [2]}),
        (["a", "labels", "more"], {"a": [1], "labels": [2]}),
    ],
)
def test_the_outputs_that_a_request_asks_for(ask, asked, named):
    body = {
        "inputs": [tensor("a", "INT8", [1], [1]), tensor("b", "INT8", [1], [2])],
        "outputs": [{"name": name} for name in asked],
    }
    [answer], _, _ = ask(KServev2Envelope, {"body": body}, handler=data_of)
    outputs = {item["name"]: item["data"] for item in answer["outputs"]}
    assert [*outputs.items()] == [*named.items()]


@pytest.mark.parametrize(
    ("status", "phrase", "result", "error"),
    [
        (400, "", {"message": "No kitten."}, "No kitten."),
        (418, "Teapot", [1], "Teapot"),
        (500, "", [1], "Status 500"),
    ],
)
def test_an_answer_with_an_error_status_has_the_member_error(
    ask, make_context, status, phrase, result, error
):
    context = make_context()

    def handler(_rows):
        context.set_response_status(status, phrase, 0)
        return [result]

    row = {"body": {"inputs": [tensor()]}}
    [answer], _, _ = ask(KServev2Envelope, row, handler=handler, context=context)
    assert answer["error"] == error
    assert len(answer["outputs"]) == 1
    assert context.get_response_content_type(0) == "application/json"


def test_a_type_that_the_protocol_has_no_name_for(ask):
    with pytest.raises(KeyError, match="complex128"):
        ask(KServev2Envelope, {"body": {"inputs": [tensor()]}}, handler=lambda rows: [1j])


def test_a_body_that_is_not_decoded_yet(ask):
    body = b'{"inputs": [{"name": "x", "shape": [2], "datatype": "INT32", "data": [1, 2]}]}'
    [answer], _, _ = ask(KServev2Envelope, {"body": bytearray(body)}, handler=data_of)
    assert answer["outputs"][0]["data"] == [1, 2]


def test_a_parsed_body_needs_no_headers(make_context):
    body = {"inputs": [tensor()]}
    seen = []
    envelope = KServev2Envelope(lambda data, _context: seen.extend(data) or [])
    assert envelope.handle([{"body": body}], make_context()) == []
    assert [each["name"] for each in seen] == [tensor()["name"]]


def test_without_a_manifest_the_name_is_the_registered_one(ask, make_context):
    context = make_context()
    context.manifest = None
    [answer], _, _ = ask(
        KServev2Envelope, {"body": {"inputs": [tensor()]}}, handler=data_of, context=context
    )
    assert (answer["model_name"], answer["model_version"]) == ("kitten", None)


FINE = {"inputs": [tensor()]}


def with_member(**members):
    return {"inputs": [tensor() | members]}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "The body is not JSON: "),
        (b"[" * 10_000, "The JSON is nested too deeply."),
        ([], "The body must be a JSON object."),
        *(({"inputs": value}, "inputs must be a list") for value in (None, 3, "abc", {"a": 1}, [])),
        *(({"inputs": [value]}, "inputs[0] must be a JSON object.") for value in (None, 3, [1])),
        *((with_member(name=value), "inputs[0].name must be") for value in (None, 5, [], {})),
        *(
            (with_member(datatype=value), "inputs[0].datatype must")
            for value in (None, 5, ["FP32"])
        ),
        *(
            (with_member(shape=value), "inputs[0].shape must be a list")
            for value in (None, "4", 4, [1.5], [True], [[4]], [-2], [10**30], [10**9, 0])
        ),
        (with_member(shape=[3]), "Input 'x': data does not fit the shape: "),
        (with_member(shape=[-1, -1]), "Input 'x': data does not fit the shape: "),
        (with_member(shape=[1] * 70), "Input 'x': data does not fit the shape: "),
        (with_member(data=[[1], [2, 3]]), "Input 'x': data does not fit the shape: "),
        (with_member(data=None), "Input 'x': data does not fit the shape: "),
        (with_member(data=list("abcd")), "Input 'x': data is not FP32."),
        (with_member(data=[1, 2, 3, None]), "Input 'x': data is not FP32."),
        (with_member(data=[10**400, 2, 3, 4]), "Input 'x': data is not FP32."),
        *(
            (
                with_member(datatype="BYTES", data=value),
                "Input 'x': data must be a list of at least",
            )
            for value in ([], 5, {}, None, "text")
        ),
        *((with_member(parameters=value), "inputs[0].parameters") for value in (5, [1], "x")),
        *((FINE | {"parameters": value}, "parameters must be a JSON") for value in (5, [1])),
        *((FINE | {"outputs": value}, "outputs must be a list.") for value in (5, {"a": 1})),
        (FINE | {"outputs": [5]}, "outputs[0] must be a JSON object."),
        *((FINE | {"outputs": [{"name": name}]}, "outputs[0].name") for name in (None, [1])),
        (FINE | {"outputs": [{"name": "x", "parameters": 3}]}, "outputs[0].parameters"),
        (FINE | {"id": [1, {}]}, "id must be a text."),
    ],
)
def test_an_invalid_request_is_answered_with_400(ask, body, why):
    bad, good = ask(KServev2Envelope, {"body": body}, {"body": FINE}, handler=data_of)[0]
    assert bad["code"] == 400
    assert bad["message"] == bad["error"]
    assert bad["message"].startswith(why)
    assert len(bad["message"]) < 300
    assert good["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0]


def test_requests_of_torchserves_clients_against_the_protocol(ask):
    inputs = [
        tensor("a", "float32"),
        tensor("b", "INT8", [1], [1000.5]),
        tensor("c", "FP32", [0, 3], []),
        tensor("d", "FP32", [1], [float("nan")]),
    ]
    [answer], seen, _ = ask(KServev2Envelope, {"body": {"inputs": inputs}}, handler=data_of)
    assert len(answer["outputs"]) == 4
    assert data_of(seen)[1:3] == [[1000.5], []]


def test_each_request_of_a_batch_is_answered_by_itself(ask):
    answers, _, context = ask(
        KServev2Envelope,
        {"body": {"id": "a", "inputs": [tensor("one"), tensor("two", shape=[4])]}},
        {"body": b"kitten"},
        {"body": {"inputs": [tensor("three", "INT8", [1], [3])]}},
        handler=data_of,
    )
    names = [[output["name"] for output in answers[i]["outputs"]] for i in (0, 2)]
    assert names == [["one", "two"], ["three"]]
    assert [answers[0]["id"], answers[2]["id"]] == ["a", "id-2"]
    assert answers[1]["code"] == context.get_response_status(1)[0] == 400
    assert context.input_names == ["one", "two", "three"]
