import pytest

from marserve.handlers.request_envelope.body import BodyEnvelope


@pytest.mark.parametrize(
    ("row", "value"),
    [({"data": b"1"}, b"1"), ({"body": [2]}, [2]), ({"data": b"", "body": b"3"}, b"3"), ({}, None)],
)
def test_the_handler_gets_the_content_of_a_request(ask, row, value):
    answers, seen, _ = ask(BodyEnvelope, {"body": "first"}, row)
    assert seen == answers == ["first", value]


def test_results_are_not_changed(ask):
    assert ask(BodyEnvelope, {"body": 1}, handler=lambda data: {"any": "thing"})[0] == {
        "any": "thing"
    }
