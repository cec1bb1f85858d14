"""The two gRPC services of TorchServe, as their clients meet them."""

import json
import re

import pytest
from grpc_client import connected, failure, request

pytestmark = [pytest.mark.integration, pytest.mark.quick]

NOT_FOUND = "org.pytorch.serve.archive.model.ModelNotFoundException"


@pytest.fixture(scope="module")
def model(server, handlers):
    server.install(handlers / "parts.py", "m")
    return "m"


@pytest.fixture
def client(server):
    with connected(server) as opened:
        yield opened


@pytest.fixture
def manager(server):
    with connected(server, "management") as opened:
        yield opened


def orders(**given):
    return json.dumps(given).encode()


# -- inference -------------------------------------------------------------------------------------


def test_ping_is_that_of_http(server, client):
    answer = client.call("inference", "Ping")
    assert answer.health == '{\n  "status": "Healthy"\n}'


def test_a_handler_gets_each_input_as_bytes_and_the_metadata_as_headers(client, model):
    metadata = [
        ("x-Tenant".lower(), "a"),
        ("x-many", "1"),
        ("x-many", "2"),
        ("x-raw-bin", b"\x00\xff"),
        ("authorization", "Bearer secret"),
        ("cookie", "secret"),
    ]
    inputs = {"one": b"{}", "two": b"\xff" * 10}
    answer = json.loads(client.predict(model, input=inputs, metadata=metadata))
    assert answer["parts"] == {"one": ["bytearray", 2], "two": ["bytearray", 10]}
    headers = answer["headers"]
    assert headers["x-tenant"] == "a"
    assert headers["x-many"] == "1, 2"
    assert headers["x-raw-bin"] == "AP8="
    assert "secret" not in str(headers)


def test_a_version_can_be_named(client, model):
    assert client.predict(model, orders(id="1"), model_version="1.0") == b"1"
    assert failure(lambda: client.predict(model, model_version="2.0")) == (
        "INTERNAL",
        "Model version: 2.0 does not exist for model: m\n"
        "org.pytorch.serve.archive.model.ModelVersionNotFoundException",
    )


def test_failures_have_the_words_of_torchserve(server, client, model):
    assert failure(lambda: client.predict("gone")) == (
        "INTERNAL",
        f"Model not found: gone\n{NOT_FOUND}",
    )
    assert failure(lambda: client.predict("")) == (
        "INTERNAL",
        "Parameter model_name is required.\nBadRequestException.()",
    )
    code, text = failure(lambda: client.predict(model, orders(do="raise")))
    assert (code, text.splitlines()[-1]) == (
        "UNAVAILABLE",  # of a 503
        "org.pytorch.serve.http.InternalServerException",
    )
    assert failure(lambda: client.predict(model, metadata=[("x-timeout-ms", "soon")]))[0] == (
        "INVALID_ARGUMENT"
    )


def test_no_worker_is_told_as_torchserve_does(server, client, handlers):
    server.install(handlers / "parts.py", "unserved", initial_workers=0)
    code, text = failure(lambda: client.predict("unserved"))
    assert code == "INTERNAL"
    assert text.startswith('Model "unserved" has no worker to serve inference request.')
    assert text.endswith("\nInternalServerException.()")


def test_an_answer_in_pieces_is_a_message_each_as_it_comes(client, model, make_gate):
    gate = make_gate()
    answers = client.stream(model, orders(pieces=2, gate=gate.path))
    assert next(answers).prediction == b"0;"
    gate.open()
    assert [answer.prediction for answer in answers] == [b"end"]


def test_a_handler_that_does_not_stream_answers_a_stream_with_one_message(client, model):
    assert [answer.prediction for answer in client.stream(model, orders(id="x"))] == [b"x"]


def test_an_answer_in_pieces_is_put_together_for_who_wants_one(client, model):
    assert client.predict(model, orders(pieces=3)) == b"0;1;end"


def test_requests_of_a_stream_are_answered_by_messages_and_failures_too(client, model):
    answers = client.method("inference", "StreamPredictions2")(
        iter(
            [
                request(model, orders(id="1"), sequence_id="s"),
                request(model, orders(id="2")),
                request("gone", sequence_id="t"),
                request(model, orders(id="3"), sequence_id="s"),
            ]
        )
    )
    found = list(answers)
    assert [each.prediction for each in found if each.prediction] == [b"1", b"3"]
    failed = {each.status.message: each.status for each in found if each.HasField("status")}
    assert {text: status.code for text, status in failed.items()} == {
        "Parameter sequenceId is required.": 13,
        "Model not found: gone": 13,
    }
    (detail,) = failed["Model not found: gone"].details
    assert detail.type_url == "type.googleapis.com/google.rpc.ErrorInfo"
    assert NOT_FOUND.encode() in detail.value


def test_a_request_of_a_stream_does_not_wait_for_the_one_before(client, model, server, make_gate):
    gate = make_gate()
    with_two = {"min_worker": 2, "synchronous": "true"}
    server.management("PUT", f"/models/{model}", params=with_two)
    answers = client.method("inference", "StreamPredictions2")(
        iter(
            [
                request(model, orders(id="slow", gate=gate.path), sequence_id="1"),
                request(model, orders(id="fast"), sequence_id="2"),
            ]
        )
    )
    assert next(answers).prediction == b"fast"
    gate.open()
    assert next(answers).prediction == b"slow"


# -- workflows -------------------------------------------------------------------------------------


def test_a_name_that_no_model_has_may_be_that_of_a_workflow(client, install_workflow, handlers):
    functions = (handlers / "functions.py").read_text()
    name = install_workflow("models: {}\ndag: {tell: []}\n", functions)
    told = json.loads(client.predict(name, input={"body": b"hello"}))
    assert told["parts"] == {"body": "hello"}
    assert [json.loads(each.prediction)["parts"] for each in client.stream(name, b"x")] == [
        {"data": "x"}
    ]
    code, text = failure(lambda: client.predict(name, model_version="1.0"))
    assert (code, text.splitlines()[0]) == ("INTERNAL", f"Model not found: {name}")


# -- management ------------------------------------------------------------------------------------


def test_the_life_of_a_model(server, manager, client, make_archive):
    make_archive(server.store, "def handle(d, c):\n    return d and ['in'] * len(d)\n", "life")
    assert manager.manage("RegisterModel", url="life.mar", initial_workers=1, synchronous=True) == (
        'Model "life" Version: 1.0 registered with 1 initial workers'
    )
    assert client.predict("life", b"x") == b"in"
    described = json.loads(manager.manage("DescribeModel", model_name="life"))
    assert [each["modelVersion"] for each in described] == ["1.0"]
    assert described == server.management("GET", "/models/life").json()
    listed = json.loads(manager.manage("ListModels"))
    assert {"modelName": "life", "modelUrl": "life.mar"} in listed["models"]
    assert manager.manage("ScaleWorker", model_name="life", min_worker=2, synchronous=True) == (
        "Workers scaled to 2 for model: life"
    )
    assert manager.manage("SetDefault", model_name="life", model_version="1.0") == (
        'Default version successfully updated for model "life" to "1.0"'
    )
    assert failure(lambda: manager.manage("RegisterModel", url="life.mar"))[0] == "ABORTED"
    assert manager.manage("UnregisterModel", model_name="life") == 'Model "life" unregistered'
    assert failure(lambda: manager.manage("DescribeModel", model_name="life")) == (
        "NOT_FOUND",
        f"Model not found: life\n{NOT_FOUND}",
    )


def test_a_registration_does_not_wait_unless_it_is_told_to(server, manager, make_archive):
    make_archive(server.store, "def handle(d, c):\n    return d and ['in'] * len(d)\n", "later")
    answer = manager.manage("RegisterModel", url="later.mar", initial_workers=1)
    assert answer == "Processing worker updates..."
    server.wait_workers("later", "READY")
    manager.manage("UnregisterModel", model_name="later")


@pytest.mark.parametrize(
    ("name", "fields", "code", "text"),
    [
        ("RegisterModel", {}, "INVALID_ARGUMENT", "Parameter url is required."),
        ("RegisterModel", {"url": "gone.mar"}, "NOT_FOUND", "Model not found"),
        ("RegisterModel", {"url": "http://127.0.0.1:1/a.mar"}, "INVALID_ARGUMENT", "ownload"),
        ("ScaleWorker", {"model_name": "gone"}, "NOT_FOUND", "Model not found: gone"),
        ("SetDefault", {"model_name": "gone", "model_version": "1"}, "NOT_FOUND", "Model not"),
        ("UnregisterModel", {}, "INVALID_ARGUMENT", "Parameter url is required."),
        ("UnregisterModel", {"model_name": "gone"}, "NOT_FOUND", "Model not found: gone"),
        ("DescribeModel", {"model_name": "gone", "customized": True}, "NOT_FOUND", "Model not"),
    ],
)
def test_what_cannot_be_managed_is_said_with_the_code_of_torchserve(
    manager, name, fields, code, text
):
    found = failure(lambda: manager.manage(name, **fields))
    assert found[0] == code
    assert text in found[1]
    assert re.search(r"\norg\.pytorch\.serve\.[\w.]+Exception$", found[1])


def test_models_cannot_be_changed_where_that_is_off(start_server):
    with start_server(enable_model_api="false") as server, connected(server, "management") as off:
        refusal = (
            "PERMISSION_DENIED",
            "Model API disabled\norg.pytorch.serve.archive.model.ModelException",
        )
        assert failure(lambda: off.manage("RegisterModel", url="m.mar")) == refusal
        assert failure(lambda: off.manage("UnregisterModel", model_name="m")) == refusal
        assert json.loads(off.manage("ListModels")) == {"models": []}
