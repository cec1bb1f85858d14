"""What a server says of itself and its models."""

import json
import math
from typing import Any, cast

import pytest

from marserve.tools.bench.client import Answer, Client
from marserve.tools.bench.errors import BenchError, ServerUnreachable
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.model_server import ModelServer

TORCHSERVES: dict[str, Any] = {
    "modelName": "m",
    "modelVersion": "2.0",
    "modelUrl": "m.mar",
    "minWorkers": 1,
    "maxWorkers": 3,
    "batchSize": 4,
    "maxBatchDelay": 50,
    "responseTimeout": 30,
    "workers": [{"status": "READY"}, {"status": "UNLOADING"}],
    "jobQueueStatus": {"remainingCapacity": 98, "pendingRequests": 2},
}
OURS = {
    **TORCHSERVES,
    "batchPolicy": "adaptive",
    "maxLatencyMs": 20,
    "jobQueueSize": 500,
    "compiledBatchSizes": [1, 4],
    "dynamicBatchSize": True,
    "numRequests": 3,
    "handler": "other.py",
    "decidedBy": {
        "batchSize": "snapshot",
        "batchPolicy": "yaml",
        "compiledBatchSizes": "request",
        "dynamicBatchSize": "catalog",
        "handler": "request",
        "maxBatchDelay": "performance_hint",
        "responseTimeout": "server",
    },
    "batching": {"isAutomatic": True},
    "workers": [{"status": "UNLOADING", "lastError": "It is broken."}],
}
METRICS = """\
# TYPE marserve_batch_size histogram
marserve_batch_size_bucket{model_name="m",model_version="1.0",le="1.0"} 7.0
marserve_batch_size_count{model_name="m",model_version="1.0"} 10.0
marserve_batch_size_sum{model_name="m",model_version="1.0"} 25.0
marserve_batch_size_count{model_name="m",model_version="2.0"} 1.0
marserve_batch_size_sum{model_name="m",model_version="2.0"} 8.0
marserve_batch_size_count{model_name="other",model_version="1.0"} 100.0
marserve_batch_size_sum{model_name="other",model_version="1.0"} 100.0
"""


class FakeClient:
    """Answers by method and path; one without answers is not there."""

    destination = Destination("http://server:8081")

    def __init__(self, **answers: tuple[int, Any]) -> None:
        self.answers = {name.replace("_", " ", 1): answer for name, answer in answers.items()}

    def with_answer(self, what: str, status: int, body: Any) -> "FakeClient":
        self.answers[what] = (status, body)
        return self

    def ask(
        self, method: str, path: str, body: bytes | None = None, timeout: float | None = None
    ) -> Answer:
        if not self.answers:
            raise ServerUnreachable("Nothing answers.")
        key = f"{method} {path.partition('?')[0]}"
        status, document = self.answers.get(key, (404, {"code": 404, "message": "Not found."}))
        text = document if isinstance(document, str) else json.dumps(document)
        return Answer(status, text.encode(), {"server": "nginx"}, 0.001)


def asking(*answers: tuple[str, int, Any], model: str = "m", version: str = "") -> ModelServer:
    """A server whose listeners are one."""
    client = FakeClient()
    for what, status, body in answers:
        client.with_answer(what, status, body)
    one = cast("Client", client)
    return ModelServer(one, one, one, model, version)


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ({"info": {"title": "TorchServe APIs", "version": "0.12.0"}, "paths": {"/ping": {}}},
         "TorchServe 0.12.0"),
        ({"info": {"title": "marserve APIs", "version": "0.1.0"}, "paths": {"/ready": {}}},
         "marserve 0.1.0"),
        ("<html>hello</html>", "nginx"),
        ({"code": 404}, "nginx"),
    ],
)  # fmt: skip
def test_who_it_is(document, name):
    assert asking(("OPTIONS /", 200, document)).identity() == name


def test_a_model_of_torchserve():
    model = asking(("GET /models/m", 200, [TORCHSERVES])).describe()
    settings = {"batch_size": "4", "max_batch_delay": "50", "response_timeout": "30"}
    assert model.settings == model.chosen == settings
    assert model.scale == {"min_worker": 1, "max_worker": 3}
    assert (model.version, model.archive) == ("2.0", "m.mar")
    assert (model.ready_workers, model.queue_size) == (1, 100)
    assert not model.is_live


def test_a_model_of_marserve():
    model = asking(("GET /models/m/2.0", 200, [OURS]), version="2.0").describe()
    chosen = {
        "batch_size": "auto",
        "compiled_batch_sizes": "1,4",
        "dynamic_batch_size": "true",
        "handler": "other.py",
    }
    assert model.chosen == chosen
    assert model.settings == chosen | {
        "max_batch_delay": "50",
        "batch_policy": "adaptive",
        "max_latency_ms": "20",
        "num_requests": "3",
        "job_queue_size": "500",
        "response_timeout": "30",
    }
    assert (model.ready_workers, model.queue_size) == (0, 500)
    assert model.last_error == "It is broken."
    assert model.is_live


@pytest.mark.parametrize(
    ("more", "obstacle"),
    [
        ({}, ""),
        ({"workflow": "w"}, "is a node of the workflow w"),
        ({"decidedBy": {"isolateFailures": "yaml"}}, ""),
        ({"decidedBy": {"isolateFailures": "catalog"}}, "has isolateFailures from its catalog"),
    ],
)
def test_what_a_registration_cannot_make(more, obstacle):
    assert asking(("GET /models/m", 200, [{**OURS, **more}])).describe().obstacle == obstacle


def test_a_model_that_is_not_served_is_told_with_those_that_are():
    listed = {"models": [{"modelName": "a"}, {"modelName": "b"}]}
    server = asking(("GET /models", 200, listed))
    assert server.find() is None
    with pytest.raises(BenchError, match=r"There is no model m\. It serves: a, b\."):
        server.describe()
    with pytest.raises(BenchError, match=r"no model m 3\. It serves no models\."):
        asking(("GET /models", 200, {"models": []}), version="3").describe()


@pytest.mark.parametrize(
    "body",
    [
        "<html>",
        {},
        [],
        [{}],
        [{"modelVersion": "1"}],
        [1],
        [{**OURS, "jobQueueSize": math.inf}],
        [{**TORCHSERVES, "jobQueueStatus": [1]}],
    ],
)
def test_another_kind_of_server_is_told(body):
    with pytest.raises(BenchError, match="does not have TorchServe's management interface"):
        asking(("GET /models/m", 200, body)).describe()


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, [{"customizedMetadata": {"optimization": {}}}], {"optimization": {}}),
        (200, [{"customizedMetadata": "words"}], {}),
        (200, [{}], {}),
        (200, [], {}),
        (200, "<html>", {}),
        (500, {"code": 500, "message": "The handler failed."}, {}),
    ],
)
def test_what_the_handler_says_of_its_model(status, body, text):
    assert asking(("GET /models/m", status, body)).handler_metadata() == text


def test_a_wrong_token_is_told_with_the_option():
    refused = {"code": 400, "message": "Token Authorization failed. Token incorrect."}
    with pytest.raises(BenchError, match=r"400 Token .*--management-token or --key-file"):
        asking(("GET /models/m", 400, refused)).describe()


def test_where_there_is_no_management_nothing_is_known():
    assert asking().describe_if_possible() is None
    assert asking().batches() is None


def test_what_the_server_refuses_is_told_in_its_words():
    server = asking(("PUT /models/m", 400, {"message": "batch_size=0: 1 or more."}))
    with pytest.raises(BenchError, match=r"does not set batch_size=0: 400 batch_size=0: 1 or"):
        server.change(batch_size=0)


@pytest.mark.parametrize(("version", "counted"), [("", (33.0, 11.0)), ("2.0", (8.0, 1.0))])
def test_batches_of_this_model_are_counted(version, counted):
    assert asking(("GET /metrics", 200, METRICS), version=version).batches() == counted


@pytest.mark.parametrize(
    "answer", [(200, "# nothing\n"), (200, "<html>hi</html>"), (404, "not here")]
)
def test_a_server_that_counts_no_batches(answer):
    assert asking(("GET /metrics", *answer)).batches() is None


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"code": 503, "message": "No worker."}', "No worker."),
        (b'{"message": {}}', '{"message": {}}'),
        (b"  plain\n words ", "plain words"),
        (b"\xff", "\ufffd"),
        (b"x" * 500, "x" * 200 + "..."),
    ],
)
def test_what_an_answer_says(body, sentence):
    assert Answer(503, body, {}, 0).sentence == sentence
