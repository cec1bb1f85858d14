import pytest

from marserve.handlers.request_envelope.base import BaseEnvelope


class Doubling(BaseEnvelope):
    """As a user would write one for TorchServe."""

    def parse_input(self, data):
        return [2 * row["body"] for row in data]

    def format_output(self, data):
        return [{"name": self.context.model_name, "result": item} for item in data]


def test_a_custom_envelope(ask):
    answers, seen, _ = ask(Doubling, {"body": 1}, {"body": 2})
    assert seen == [2, 4]
    assert answers == [{"name": "kitten", "result": 2}, {"name": "kitten", "result": 4}]


def test_an_empty_batch_and_an_empty_result_are_passed_on(ask):
    assert ask(Doubling)[:2] == ([], [])
    assert ask(Doubling, {"body": 1}, handler=lambda data: None)[0] is None


def test_an_envelope_must_parse_and_format():
    with pytest.raises(TypeError, match="abstract"):
        BaseEnvelope(lambda data, context: data)
