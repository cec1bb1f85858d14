"""OpenAI's API: which model gets a request, and what; the list of models of both protocols."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fakes
import pytest

from marserve.frontend.batching.options import Batching
from marserve.frontend.http.responses import json_response
from marserve.frontend.http.router import Route
from marserve.frontend.rest.inference import inference_routes
from marserve.frontend.rest.kserve import kserve_platform_routes, kserve_routes
from marserve.frontend.rest.vertex import vertex_routes

Ask = Callable[..., Any]

CHAT = "/v1/chat/completions"
CREATED = 1700000000


@pytest.fixture
def registry(registry, make_model):
    """Versions 1 and 2 of engine, and 3 of m, serve OpenAI's API."""

    def add(name, version, openai, *names):
        settings = SimpleNamespace(batching=Batching(), stack_inputs="", openai=openai)
        archive = SimpleNamespace(contents=SimpleNamespace(openai_names=names))
        model = replace(make_model(name, version), settings=settings, archive=archive)
        known = registry
        known.add(model)

    add("engine", "1", "server", "org/served", "engine", "engine:1", "m", "m:3")
    add("engine", "2", "server", "org/served", "org/other", "engine", "engine:2")
    add("engine", "3", "none")
    add("m", "3", "server", "org/other", "m", "m:3")
    return registry


def test_a_compressed_body_is_decoded(ask):
    body = gzip.compress(json.dumps({"model": "engine"}).encode())
    asked = ask(CHAT, "POST", body, "Content-Encoding: gzip").document
    assert (asked["model"], asked["parts"]) == ("engine", [["body", '{"model": "engine"}']])
    broken = ask(CHAT, "POST", body[:-1], "Content-Encoding: gzip")
    assert (broken.status, broken.document["error"]["type"]) == (400, "invalid_request_error")
    assert "The Content-Encoding is gzip" in broken.document["error"]["message"]
    refused = ask(CHAT, "POST", body, "Content-Encoding: zstd")
    assert refused.status == 415
    assert refused.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("name", "model", "version", "by_version"),
    [
        ("engine", "engine", "1", False),
        ("engine:1", "engine", "1", True),
        ("engine:2", "engine", "2", True),
        ("m:3", "m", "3", True),  # before the served name of engine 1
        ("org/served", "engine", "1", False),  # the default version before others
        ("org/other", "m", "3", False),
    ],
)
def test_the_body_names_the_model(name, model, version, by_version, ask):
    body = json.dumps({"messages": [{"model": "m"}], "model": name}).encode()
    asked = ask(CHAT, "POST", body, "Content-Type: application/json").document
    assert (asked["model"], asked["version"]) == (model, version)
    assert asked["by_version"] == by_version
    assert asked["headers"] == {"url_path": "v1/chat/completions", "explain": "False"}
    assert asked["parts"] == [["body", body.decode()]]


@pytest.mark.parametrize("name", ["m", "m:1", "engine:3", "nobody", "engine:"])
def test_other_names_are_unknown(name, ask):
    answer = ask(CHAT, "POST", json.dumps({"model": name}).encode())
    assert answer.status == 404
    assert name.partition(":")[0] in answer.document["error"]["message"]


def test_of_equal_members_the_last_counts_as_for_parsers(ask):
    body = b'{"model": "nobody", "m\\u006fdel" : "engine:2" }\n'
    assert ask(CHAT, "POST", body).document["version"] == "2"


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'"model"', b'{"model": "engine"]', b'{"model": null}', b"{\xff"]
)
def test_a_body_without_a_model_is_refused(body, ask):
    error = ask(CHAT, "POST", body).document["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    assert error["code"] == "BadRequestException"


def test_options_are_read_and_limits_apply(ask):
    body = b'{"model": "engine"}'
    asked = ask(CHAT, "POST", body, "X-Priority: high", "X-Timeout-Ms: 500").document
    assert asked["options"] == [0.5, "HIGH"]
    refused = ask(CHAT, "POST", b'{"model": "engine", "prompt": "%b"}' % (b"x" * 1000))
    assert (refused.status, list(refused.document)) == (413, ["error"])


def test_a_path_behind_a_version_reaches_the_handler(ask):
    body = b'{"model": "anything"}'
    asked = ask(f"/predictions/engine/2{CHAT}", "POST", body).document
    assert (asked["version"], asked["by_version"]) == ("2", True)
    assert asked["headers"] == {"url_path": "v1/chat/completions", "explain": "False"}


NAMES = ["engine", "engine:1", "m:3", "engine:2", "org/served", "org/other"]


def test_models_are_listed_for_both_protocols(ask):
    listed = ask("/v1/models", "GET").document
    assert listed["models"] == ["engine", "m"]
    assert listed["object"] == "list"
    assert sorted(each["id"] for each in listed["data"]) == sorted(NAMES)
    for each in listed["data"]:
        members = {"object": "model", "created": CREATED, "owned_by": "marserve"}
        assert each == {"id": each["id"], **members}


def test_verbs_of_kserve_predict_with_any_method(ask):
    assert ask("/v1/models/m:predict", "GET").document["model"] == "m"


@pytest.fixture
def ask_platform(registry):
    async def root(_request):
        return json_response({})

    routes = kserve_platform_routes(registry, 1000, Route(root))
    return lambda path, method="GET", body=b"": fakes.exchange(
        routes, fakes.request(path, method, body)
    )


def test_the_platform_kserve_keeps_its_answers(ask, ask_platform, registry, make_model):
    assert ask_platform("/v1/models").document == ask("/v1/models", "GET").document
    found = {"object": "model", "created": CREATED, "owned_by": "marserve"}
    assert ask_platform("/v1/models/m").document == {"name": "m", "ready": True, "id": "m", **found}
    known = registry
    known.add(make_model("idle", ready=0))
    idle = ask_platform("/v1/models/idle")
    assert (idle.status, idle.document["name"], idle.document["ready"]) == (503, "idle", False)
    unknown = ask_platform("/v1/models/nobody")
    assert unknown.document["error"] == unknown.document["message"] == "Model not found: nobody"
    assert ask_platform(CHAT, "POST", b'{"model": "engine"}').document["model"] == "engine"
    assert ask_platform("/v1/models/m:predict", "POST").document["model"] == "m"


def test_a_route_of_vertex_does_not_replace_those_of_openai(registry):
    routes = {
        **inference_routes(registry, 1000),
        **kserve_routes(registry, 1000, open_inference=False),
    }
    routes = dict(vertex_routes(registry, 1000, routes, predict=CHAT, health=""))
    sent = fakes.request(CHAT, "POST", b'{"model": "engine:2"}')
    assert fakes.exchange(routes, sent).document["version"] == "2"
