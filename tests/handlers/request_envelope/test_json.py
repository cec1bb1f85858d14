import base64

import pytest

from marserve.handlers.request_envelope.json import JSONEnvelope


def encoded(content: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(content).decode()}


@pytest.mark.parametrize(
    "row",
    [
        {"body": {"instances": [1, 2]}},
        {"data": {"instances": [1, 2]}},
        {"instances": [1, 2]},
        {"body": bytearray(b'{"instances": [1, 2]}')},
    ],
)
def test_where_the_instances_are(ask, row):
    answers, seen, context = ask(JSONEnvelope, row)
    assert seen == [1, 2]
    assert answers == ['{"predictions": [1, 2]}']
    assert context.get_response_content_type(0) is None


def test_binary_instances_and_columns(ask):
    instances = [encoded(b"one"), {"image": encoded(b"two"), "size": 3}, {"b64": "?", "more": 1}]
    _, seen, _ = ask(JSONEnvelope, {"body": {"instances": instances}}, handler=lambda data: [0] * 3)
    assert seen == [b"one", {"image": b"two", "size": 3}, {"b64": "?", "more": 1}]


def test_the_instances_of_a_batch_are_one_list_for_the_handler(ask):
    answers, seen, _ = ask(
        JSONEnvelope,
        {"body": {"instances": [1, 2]}},
        {"body": {"instances": []}},
        {"body": {"instances": [3]}},
        handler=lambda data: [{"n": item} for item in data],
    )
    assert seen == [1, 2, 3]
    assert answers == [
        '{"predictions": [{"n": 1}, {"n": 2}]}',
        '{"predictions": []}',
        '{"predictions": [{"n": 3}]}',
    ]


def test_too_few_results_of_a_single_request_are_passed_on(ask):
    answers, _, _ = ask(JSONEnvelope, {"body": {"instances": [1, 2]}}, handler=lambda data: ["all"])
    assert answers == ['{"predictions": ["all"]}']


@pytest.mark.parametrize(
    "row",
    [
        {"body": {"inputs": []}},
        {"body": b"{"},
        {"body": 7},
        {},
        *({"body": {"instances": value}} for value in (None, 5, "abc", {"a": 1}, True)),
        *({"body": {"instances": [{"b64": value}]}} for value in ("!!!", "abc", 5, None, "\u00e9")),
        {"body": {"instances": [{"image": {"b64": "a"}}]}},
    ],
)
def test_an_invalid_request_is_answered_with_400(ask, row):
    [answer], seen, context = ask(JSONEnvelope, row)
    assert seen is None
    assert answer["code"] == context.get_response_status(0)[0] == 400
    assert len(answer["message"]) < 300


def test_base64_in_lines(ask):
    text = base64.encodebytes(bytes(100)).decode()
    row = {"body": {"instances": [{"b64": text}]}}
    _, seen, _ = ask(JSONEnvelope, row, handler=lambda data: [len(item) for item in data])
    assert seen == [bytes(100)]
