import pytest

from marserve.handlers.request_envelope.kserve import KServeEnvelope


@pytest.mark.parametrize(
    "row",
    [
        {"body": {"instances": [{"data": "a"}, {"data": "b"}]}},
        {"data": {"instances": [{"data": "a"}, {"data": "b"}]}},
        {"body": bytearray(b'{"instances": [{"data": "a"}, {"data": "b"}]}')},
    ],
)
def test_one_request(ask, row):
    answers, seen, _ = ask(KServeEnvelope, row)
    assert seen == [{"data": "a"}, {"data": "b"}]
    assert answers == [{"predictions": [{"data": "a"}, {"data": "b"}]}]


def test_a_single_request_gets_all_results(ask):
    row = {"body": {"instances": [1, 2]}}
    assert ask(KServeEnvelope, row, handler=lambda data: [sum(data)])[0] == [{"predictions": [3]}]


def test_explanations(ask):
    answers, _, _ = ask(KServeEnvelope, {"body": {"instances": [1]}}, headers=[{"explain": "True"}])
    assert answers == [{"explanations": [1]}]


@pytest.mark.parametrize(
    "row",
    [
        {"body": {}},
        {"body": b"{"},
        {"body": b"\xff\xfe"},
        {"body": b"[" * 10_000},
        {},
        *({"body": {"instances": value}} for value in (None, 5, "abc", {"a": 1}, True)),
        {"body": b'{"instances": [%s]}' % (b"9" * 5000)},
    ],
)
def test_an_invalid_request_is_answered_with_400(ask, row):
    [answer], seen, context = ask(KServeEnvelope, row)
    assert seen is None
    assert answer["code"] == context.get_response_status(0)[0] == 400
    assert len(answer["message"]) < 300


def test_a_model_in_an_envelope_is_described(ask):
    answers, seen, _ = ask(
        KServeEnvelope, {}, handler=lambda data: [{"of": "kittens"}], headers=[{"describe": "True"}]
    )
    assert (seen, answers) == ([{}], [{"of": "kittens"}])


def test_each_request_of_a_batch_is_answered_by_itself(ask):
    answers, seen, _ = ask(
        KServeEnvelope,
        {"body": {"instances": [1, 2]}},
        {"body": {"instances": [3]}},
        handler=lambda data: [10 * item for item in data],
    )
    assert seen == [1, 2, 3]
    assert answers == [{"predictions": [10, 20]}, {"predictions": [30]}]
