import tempfile
import uuid
from unittest.mock import MagicMock

import pytest
import torch
from ts.torch_handler.unit_tests.test_utils.model_dir import copy_files, download_model

from marserve.backend.errors import PredictionException
from marserve.backend.metrics import MetricsStore
from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.image_classifier import ImageClassifier
from marserve.handlers.request_envelope.json import JSONEnvelope
from marserve.handlers.request_envelope.kserve import KServeEnvelope
from marserve.handlers.request_envelope.kservev2 import KServev2Envelope
from marserve.handlers.torchserve_api.completed_context import completed
from marserve.handlers.torchserve_api.mock_context import MockContext

MODEL_FILE = """
import torch

class Doubler(torch.nn.Module):
    def forward(self, x):
        return 2 * x
"""


@pytest.fixture
def context(tmp_path):
    name = f"model_{tmp_path.name}.py"
    (tmp_path / name).write_text(MODEL_FILE)
    (tmp_path / "conf.yaml").write_text("handler: {profile: true}")
    return MockContext(None, str(tmp_path), name, None, "doubler", "conf.yaml")


def test_a_handler_runs_with_it(context):
    handler = BaseHandler()
    handler.initialize(context)
    assert handler.handle([{"body": [1.0]}], context) == [[2.0]]
    context.explain = True
    with pytest.raises(PredictionException, match="gives no explanations"):
        handler.handle([{"body": [1.0]}], context)


def test_its_attributes_describe_the_model(context, tmp_path):
    assert context.model_name == context.metrics.model_name == "doubler"
    assert context.system_properties["model_dir"] == str(tmp_path)
    assert context.model_yaml_config == {"handler": {"profile": True}}
    assert "serializedFile" not in context.manifest["model"]


def test_its_defaults():
    context = MockContext()
    assert context.manifest == {"model": {"serializedFile": "model.pt", "modelFile": "model.py"}}
    assert (context.model_name, context.model_yaml_config) == ("mnist", {})
    expected = 0 if torch.cuda.is_available() else None
    assert context.system_properties["gpu_id"] == expected
    assert not context.get_request_header(0, "explain")
    assert context.get_request_header(0, "describe") is None


def test_the_batch_has_as_many_requests_as_the_test_gives():
    context = MockContext(requests=2)
    context.set_response_status(418, "teapot", 2)
    context.set_response_header(5, "X-Mine", "yes")
    context.metrics.add_counter("N", 1, 4)

    assert context.get_response_status(2) == (418, "teapot")
    assert context.get_response_headers(5) == {"X-Mine": "yes"}
    assert context.get_response_status(1) == (200, None)
    assert len({context.get_request_id(place) for place in range(4)}) == 4
    assert context.get_request_id(3) == context.get_request_id(3)
    assert context.metrics.store[0].value == 1


class CopiedMockContext:
    """Like TorchServe's own, which many projects have copied."""

    def __init__(self, manifest, model_dir, yaml=None) -> None:
        self.manifest = manifest
        self.system_properties = {"model_dir": str(model_dir)}
        self.explain = False
        self.metrics = MetricsStore(uuid.uuid4(), "mnist")
        self.model_yaml_config = yaml or {}

    def get_request_header(self, idx, exp):
        return bool(idx and exp and self.explain)


@pytest.fixture
def copied(tmp_path):
    name = f"model_{tmp_path.name}.py"
    (tmp_path / name).write_text(MODEL_FILE)
    return CopiedMockContext({"model": {"modelFile": name}}, tmp_path)


@pytest.mark.parametrize("yaml", [{}, {"pt2": "eager"}, {"handler": {"profile": True}}])
def test_a_handler_runs_with_a_copy_of_torchserves(copied, yaml):
    copied.model_yaml_config = yaml
    handler = BaseHandler()
    handler.initialize(copied)
    assert handler.handle([{"body": [1.0]}, {"body": [2.0]}], copied) == [[2.0], [4.0]]
    assert copied.metrics.store[-1].name == "HandlerTime"


def test_a_copy_without_model_yaml_config_and_metrics_works(copied):
    del copied.model_yaml_config
    copied.metrics = None
    handler = BaseHandler()
    handler.initialize(copied)
    assert handler.handle([{"body": [1.0]}], copied) == [[2.0]]


class FourArguments:
    """Metrics of a test, whose method takes the arguments that TorchServe's handlers pass."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def add_time(self, name, value, idx, unit) -> None:
        self.calls.append((name, idx, unit))


def test_the_metrics_of_a_test_get_torchserves_arguments(copied):
    copied.metrics = FourArguments()
    handler = BaseHandler()
    handler.initialize(copied)
    handler.handle([{"body": [1.0]}], copied)
    assert copied.metrics.calls == [("HandlerTime", None, "ms")]


@pytest.fixture
def mocked(copied):
    return MagicMock(system_properties=copied.system_properties, manifest=copied.manifest)


def test_a_handler_runs_with_a_mock(mocked):
    handler = BaseHandler()
    handler.initialize(mocked)
    assert handler.handle([{"body": [1.0]}], mocked) == [[2.0]]
    (call,) = mocked.metrics.add_time.call_args_list
    assert call.args[::2] == ("HandlerTime", None)


def test_images_are_decoded_with_a_mock(mocked):
    handler = ImageClassifier()
    handler.initialize(mocked)
    image, other = handler.sample_input()
    assert len(handler.preprocess([{"data": image}, {"data": other}])) == 2


@pytest.mark.parametrize("envelope", [KServeEnvelope, KServev2Envelope])
def test_an_envelope_runs_with_a_mock(mocked, envelope):
    tensor = {"name": "a", "shape": [1], "datatype": "FP32", "data": [1]}
    body = {"instances": [1], "inputs": [tensor]}
    (answer,) = envelope(lambda data, context: [2]).handle([{"body": body}], mocked)
    assert answer.get("predictions") == [2] or answer["outputs"][0]["data"] == [2]


@pytest.mark.parametrize("kind", ["context", "mocked", "copied"])
@pytest.mark.parametrize("lists", [[[1, 2], [3]], [[1], []], [[1], [2]]])
def test_an_envelope_runs_two_requests_with_a_mock(request, kind, lists):
    context = request.getfixturevalue(kind)

    def handle(data, context):
        assert len({context.get_request_header(place, "x") for place in range(len(data))}) == 1
        return data

    data = [{"body": {"instances": each}} for each in lists]
    answers = KServeEnvelope(handle).handle(data, context)
    assert [answer["predictions"] for answer in answers] == lists
    assert JSONEnvelope(handle).handle(data, context) == [
        f'{{"predictions": {each}}}' for each in lists
    ]


def test_the_ids_of_instances_are_those_of_their_requests(context):
    seen = []

    def handle(data, context):
        seen.extend(context.get_request_id(place) for place in range(len(data)))
        return data

    data = [{"body": {"instances": [1, 2]}}, {"body": {"instances": [3]}}]
    KServeEnvelope(handle).handle(data, context)
    ids = [context.get_request_id(place) for place in range(2)]
    assert seen == [ids[0], ids[0], ids[1]]


def test_an_envelope_runs_without_a_context():
    envelope = KServeEnvelope(lambda data, context: data)
    assert envelope.handle([{"body": {"instances": [1]}}], None) == [{"predictions": [1]}]


def test_a_bad_image_is_refused_with_the_request_ids_of_a_test(copied):
    copied.request_ids = {0: "id-0"}
    handler = ImageClassifier()
    handler.initialize(copied)
    with pytest.raises(PredictionException, match="not an image of a known format"):
        handler.handle([{"data": b"no image"}], copied)


def test_the_profiler_runs_with_a_copy_of_torchserves(copied, monkeypatch, tmp_path):
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handler = BaseHandler()
    handler.initialize(copied)
    handler.manifest = None
    assert handler.handle([{"body": [1.0]}], copied) == [[2.0]]


@pytest.mark.parametrize(
    ("envelope", "data", "answers"),
    [
        (
            JSONEnvelope,
            [{"body": {"instances": [[1.0], [2.0]]}}],
            ['{"predictions": [[2.0], [4.0]]}'],
        ),
        (
            KServev2Envelope,
            [{"body": {"inputs": [{"name": "a", "shape": [1], "datatype": "FP32", "data": [1]}]}}],
            None,
        ),
    ],
)
def test_an_envelope_runs_with_a_copy_of_torchserves(copied, envelope, data, answers):
    handler = BaseHandler()
    handler.initialize(copied)
    found = envelope(handler.handle).handle(data, copied)
    if answers is None:
        assert found[0]["outputs"][0]["data"] == [2]
    else:
        assert found == answers


@pytest.mark.parametrize("is_copy", [False, True])
def test_spans_of_a_handler_do_nothing_without_a_server(context, copied, is_copy):
    tested = completed(copied) if is_copy else context
    assert tested.trace() is None
    with tested.span("tokenize", 1, words=3) as span:
        assert span.traceparent == ""


def test_a_file_is_fetched_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "weights.pth"
    source.write_text("weights")
    (tmp_path / "model").mkdir()
    download_model(source.as_uri(), tmp_path / "model")
    source.unlink()
    download_model(source.as_uri(), tmp_path / "model")
    assert (tmp_path / "model" / "model.pt").read_text() == "weights"


def test_files_are_copied_under_other_names(tmp_path):
    (tmp_path / "a").write_text("content")
    (tmp_path / "there").mkdir()
    copy_files(tmp_path, tmp_path / "there", {"a": "b"})
    assert (tmp_path / "there" / "b").read_text() == "content"
