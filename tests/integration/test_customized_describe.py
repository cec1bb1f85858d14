"""What a handler says about its model, in the answer of describe."""

import pytest

pytestmark = pytest.mark.integration


@pytest.fixture
def describer(server, handlers, request):
    name = f"describer-{abs(hash(request.node.name))}"
    server.install(handlers / "describer.py", name, batch_size=4, max_batch_delay=300)
    return name


def describe(server, path, **query):
    return server.management("GET", f"/models/{path}", params={"customized": "true", **query})


@pytest.mark.parametrize(
    ("text", "metadata"),
    [
        ('{"labels": ["a", "b"]}', {"labels": ["a", "b"]}),
        ("[1]", {}),
        ("no JSON", {}),
        ("null", {}),
    ],
)
def test_an_object_becomes_metadata_and_anything_else_an_empty_object(
    server, describer, text, metadata
):
    server.ask(describer, say=text)
    for path in (describer, f"{describer}/1.0"):
        answer = describe(server, path)
        assert answer.status_code == 200
        assert answer.json()[0]["customizedMetadata"] == metadata
        names = list(answer.json()[0])  # behind TorchServe's members, before ours
        assert names.index("customizedMetadata") == names.index("jobQueueStatus") + 1


@pytest.mark.parametrize("path", ["{}", "{}/all"])
def test_handlers_are_asked_on_demand_only(server, describer, path):
    server.ask(describer, say='{"a": 1}')
    answer = describe(server, path.format(describer), customized="no" if path == "{}" else "true")
    assert "customizedMetadata" not in answer.json()[0]


def test_the_question_travels_alone_and_waits_for_no_window(
    server, describer, gate, background, wait_for
):
    first = background(server.ask, describer, say='{"a": 1}', gate=gate.path)
    gate.wait_entered()
    before = background(server.ask, describer)
    server.wait_queued(describer, 1)
    asked = background(describe, server, describer)
    server.wait_queued(describer, 2)
    behind = background(server.ask, describer)
    server.wait_queued(describer, 3)
    gate.open()
    assert asked.result().json()[0]["customizedMetadata"] == {"a": 1}
    assert [each.result().json() for each in (first, before, behind)] == [1, 1, 1]


def test_a_handler_that_fails_is_reported(server, describer):
    server.ask(describer, say="raise")
    answer = describe(server, describer)
    assert answer.status_code == 503
    assert answer.json()["message"].startswith("Prediction failed. The traceback is in ")


def test_without_workers_there_is_nobody_to_ask(server, describer):
    server.management("PUT", f"/models/{describer}?min_worker=0&synchronous=true")
    answer = describe(server, describer)
    assert answer.status_code == 503
    assert answer.json()["message"] == (
        f'Model "{describer}" has no worker to serve describe request. Please use scale workers '
        "API to add workers."
    )


def test_a_client_cannot_order_a_description_for_its_batch(server, describer):
    answer = server.predict(describer, json={}, headers={"describe": "True"})
    assert answer.json() == 1
