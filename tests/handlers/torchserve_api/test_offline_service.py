"""Handlers run without a server, as other projects do it."""

import json
import struct
import sys
from typing import Any

import pytest
from ts.context import Context
from ts.model_loader import ModelLoader, ModelLoaderFactory
from ts.service import Service

from marserve.backend.errors import PredictionException

HANDLER = """
class Doubler:
    def initialize(self, context):
        self.factor = context.model_yaml_config["handler"]["factor"]

    def handle(self, data, context):
        context.metrics.add_counter("Asked", len(data))
        context.set_response_header(0, "X-First", "yes")
        return [{"value": self.factor * row["value"]} for row in data]
"""
MANIFEST = {"model": {"modelName": "doubler", "configFile": "model.yaml"}}
BATCH = [
    {
        "requestId": b"a",
        "parameters": [{"name": "value", "value": 3, "contentType": "application/json"}],
        "headers": [{"name": b"X-Who", "value": b"me"}],
    },
    {"requestId": b"b", "parameters": [{"name": "value", "value": 4, "contentType": ""}]},
]


class AnyMetrics:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a handler with this source, as a program without a server does."""
    name = f"offline_{tmp_path.name}"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(MANIFEST))
    (tmp_path / "model.yaml").write_text("handler: {factor: 2}")

    def loaded(source=HANDLER, **options):
        (tmp_path / f"{name}.py").write_text(source)
        sys.modules.pop(name, None)
        loader = ModelLoaderFactory.get_model_loader()
        return loader.load("doubler", str(tmp_path), f"{name}.py", **options)

    return loaded


def ask(service: Service, batch: Any = BATCH) -> Any:
    headers, rows, ids = Service.retrieve_data_for_inference(batch)
    service.context.request_ids = ids
    service.context.request_processor = headers
    return service._entry_point(rows, service.context)


@pytest.mark.parametrize("options", [{}, {"metrics_cache": AnyMetrics()}, {"gpu_id": 0}])
def test_a_handler_by_itself(load, options):
    service = load(**options)
    assert ask(service) == [{"value": 6}, {"value": 8}]
    assert service.context.get_request_header(0, "X-Who") == "me"
    assert service.context.get_request_header(1, "value") == {"content-type": ""}
    assert service.context.get_request_id(1) == "b"
    assert service.context.manifest == MANIFEST
    assert service.context.system_properties["gpu_id"] == options.get("gpu_id")


def test_an_envelope_around_it(load):
    body = {"instances": [{"value": 5}, {"value": 6}]}
    batch = [
        {"requestId": b"a", "parameters": [{"name": "body", "value": body, "contentType": ""}]}
    ]
    [answer] = ask(load(envelope="json"), batch)
    assert json.loads(answer) == {"predictions": [{"value": 10}, {"value": 12}]}


def test_no_batch():
    with pytest.raises(ValueError, match="Received invalid inputs"):
        Service.retrieve_data_for_inference(None)


def test_a_custom_loader(tmp_path):
    class Mine(ModelLoader):
        def load(self, model_name, model_dir, handler, gpu_id=None, batch_size=None, *_, **__):
            return Service(model_name, model_dir, None, lambda data, _: data, gpu_id, batch_size)

    service = Mine().load("mine", str(tmp_path), "")
    assert isinstance(service.context, Context)
    assert ask(service) == [{"value": 3}, {"value": 4}]


# -- the message that a service answers with -------------------------------------------------------


class Reader:
    """Reads the message as TorchServe's frontend did."""

    def __init__(self, message: bytes) -> None:
        self._rest = bytes(message)

    def integer(self) -> int:
        value, self._rest = self._rest[:4], self._rest[4:]
        return struct.unpack("!i", value)[0]

    def text(self) -> bytes:
        length = self.integer()
        value, self._rest = self._rest[:length], self._rest[length:]
        return value

    def message(self) -> tuple[int, bytes, list[tuple[Any, ...]]]:
        code, text, answers = self.integer(), self.text(), []
        while True:
            length = self.integer()
            if length == -1:
                assert self._rest == b""
                return code, text, answers
            id_, self._rest = self._rest[:length], self._rest[length:]
            head = self.text(), self.integer(), self.text()
            headers = {self.text(): self.text() for _ in range(self.integer())}
            answers.append((id_, *head, headers, self.text()))


def test_the_message_of_a_service(load):
    code, text, answers = Reader(load().predict(BATCH)).message()
    assert (code, text) == (200, b"Prediction success")
    bodies = [json.loads(item[-1]) for item in answers]
    assert bodies == [{"value": 6}, {"value": 8}]
    assert answers[0][:-1] == (b"a", b"", 200, b"", {b"X-First": b"yes"})
    assert answers[1][:-1] == (b"b", b"", 200, b"", {})


def failing(what: str) -> str:
    return f"""
from ts.service import PredictionException
def handle(data, context):
    if data is not None:
        {what}
"""


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("raise PredictionException('no cats', 404)", 404, b"no cats"),
        ("raise MemoryError", 507, b"Out of resources"),
        ("raise RuntimeError('CUDA error')", 507, b"Out of resources"),
        ("raise KeyError", 503, b"Prediction failed"),
        ("return None", 503, b"Invalid model predict output"),
        ("return [1]", 503, b"number of batch response mismatched"),
        ("return [object(), 1]", 503, b"Unsupported model output data type."),
    ],
)
def test_the_message_of_a_failure(load, what, code, text):
    message = Reader(load(failing(what)).predict(BATCH)).message()
    failures = [(id_, b"", code, b"", {}, b"error") for id_ in (b"a", b"b")]
    assert message == (code, text, failures)


def test_exceptions_of_initialize_are_raised(load):
    with pytest.raises(PredictionException, match="not today"):
        load(
            "from ts.service import PredictionException\n"
            "def handle(data, context):\n    raise PredictionException('not today', 500)\n"
        )
