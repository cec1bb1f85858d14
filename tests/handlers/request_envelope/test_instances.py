"""What the formats with several instances per request promise, shown on KServe's."""

import base64
import io

import pytest
import torch
from PIL import Image

from marserve.handlers.image_classifier import ImageClassifier
from marserve.handlers.request_envelope.kserve import KServeEnvelope
from marserve.handlers.request_envelope.kservev2 import KServev2Envelope


def test_an_invalid_request_is_refused_alone(ask):
    answers, seen, context = ask(
        KServeEnvelope,
        {"body": b"kitten"},
        {"body": {"instances": [1, 2]}},
        {"body": {"no": "instances"}},
        {"body": {"instances": [3]}},
    )
    assert seen == [1, 2, 3]
    assert [answers[1], answers[3]] == [{"predictions": [1, 2]}, {"predictions": [3]}]
    for index, why in ((0, "The body is not JSON: "), (2, "The body must be a JSON object with ")):
        assert (answers[index]["code"], answers[index]["type"]) == (400, "BadRequestException")
        assert answers[index]["message"].startswith(why)
        assert context.get_response_content_type(index) == "application/json"
    assert [context.get_response_status(i)[0] for i in range(4)] == [400, 200, 400, 200]


def test_a_batch_of_invalid_requests_does_not_reach_the_handler(ask):
    answers, seen, _ = ask(KServeEnvelope, {"body": {}}, {"body": {"instances": []}}, {"body": b""})
    assert seen is None
    assert [answers[0]["code"], answers[1], answers[2]["code"]] == [400, {"predictions": []}, 400]


class Strict(KServeEnvelope):
    """A custom envelope."""

    def instances_of(self, row):
        return [1 / item for item in super().instances_of(row)]

    def answer(self, results, index):
        return {"predictions": [100 % result for result in results]}


class OwnFormat(KServeEnvelope):
    """A custom envelope that replaces both conversions."""

    def parse_input(self, data):
        return [row["body"]["x"] for row in data]

    def format_output(self, data):
        return [{"y": result} for result in data]


def test_an_envelope_that_parses_itself_keeps_the_context(make_context, begin_batch):
    context = begin_batch(make_context(), {"name": "a"}, {"name": "b"})
    seen = []

    def handle(data, context):
        seen.extend(context.get_request_header(index, "name") for index in range(2))
        return data

    rows = [{"body": {"x": 1}}, {"body": {"x": 2}}]
    assert OwnFormat(handle).handle(rows, context) == [{"y": 1}, {"y": 2}]
    assert seen == ["a", "b"]


def test_exceptions_of_parsing_refuse_the_request_alone(ask):
    bad, good = ({"body": {"instances": [number]}} for number in (0, 1))
    answers, seen, _ = ask(Strict, bad, good)
    assert seen == [1]
    assert answers[0]["code"] == 400
    assert answers[0]["message"].endswith("ZeroDivisionError: division by zero")
    assert answers[1] == {"predictions": [0]}


def test_a_result_that_cannot_be_encoded_fails_its_request_alone(ask):
    rows = [{"body": {"instances": [number]}} for number in (1, 2)]
    answers, _, context = ask(Strict, *rows, handler=lambda data: [0, 7])
    assert answers[0]["message"].startswith("Prediction failed. The traceback is in ")
    assert context.get_response_status(0)[0] == 503
    assert answers[1] == {"predictions": [2]}


def test_a_memory_error_while_parsing_fails_the_batch(ask, monkeypatch):
    monkeypatch.setattr(
        Strict, "instances_of", lambda self, row: (_ for _ in ()).throw(MemoryError)
    )
    with pytest.raises(MemoryError):
        ask(Strict, {"body": {"instances": [1]}})


@pytest.mark.parametrize("results", [["one"], [1, 2, 3, 4], {"a": 1, "b": 2, "c": 3}])
def test_a_wrong_number_of_results_fails_a_batch_of_several_requests(ask, results):
    rows = [{"body": {"instances": [1, 2]}}, {"body": {"instances": [3]}}]
    with pytest.raises(ValueError, match="must return 3 results"):
        ask(KServeEnvelope, *rows, handler=lambda data: results)


def test_the_handler_sees_each_instances_own_request(ask, make_context):
    context = make_context()

    def handler(data):
        whose = [context.get_request_header(i, "who") for i in range(len(data))]
        context.set_response_header(2, "last", "yes")
        context.set_response_status(418, "", 2)
        return whose

    answers, _, _ = ask(
        KServeEnvelope,
        {"body": {"instances": [1, 2]}},
        {"body": {"instances": [3]}},
        handler=handler,
        headers=[{"who": "ann"}, {"who": "bob"}],
        context=context,
    )
    assert answers == [{"predictions": ["ann", "ann"]}, {"predictions": ["bob"]}]
    assert [context.get_response_headers(i) for i in range(2)] == [{}, {"last": "yes"}]
    assert [context.get_response_status(i)[0] for i in range(2)] == [200, 418]


def encode(colour: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class Channels(torch.nn.Module):
    def forward(self, x):
        return 100 * x.mean(dim=(2, 3))


@pytest.fixture
def classify(make_context, begin_batch):
    """Send requests through an envelope and a real handler."""

    def run(envelope, *bodies):
        handler = ImageClassifier()
        handler.model, handler.device, handler.topk = Channels(), torch.device("cpu"), 1
        context = begin_batch(make_context(), *({} for _ in bodies))
        answers = envelope(handler.handle).handle([{"body": item} for item in bodies], context)
        return answers, context

    return run


def test_images_through_a_real_handler(classify):
    red, blue, bad = ({"data": item} for item in (encode("red"), encode("blue"), "a"))
    answers, context = classify(
        KServeEnvelope, {"instances": [red, bad]}, {"instances": [blue, red]}
    )
    first, second = (item["predictions"] for item in answers)
    assert [[*first[0]], [*second[0]], [*second[1]]] == [["0"], ["2"], ["0"]]
    assert first[1]["code"] == 400
    assert [context.get_response_status(i)[0] for i in range(2)] == [400, 200]


def test_an_image_in_the_open_inference_protocol(classify):
    image = {"name": "photo", "shape": [1], "datatype": "BYTES", "data": [encode("blue")]}
    [answer], _ = classify(KServev2Envelope, {"inputs": [image]})
    [output] = answer["outputs"]
    assert (output["name"], output["datatype"]) == ("photo", "BYTES")
    assert output["data"] == [{"2": pytest.approx(1)}]
