"""What a shared listener does with paths that two listeners know."""

import json
from collections.abc import Callable
from typing import Any

import fakes
import pytest

from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse, json_response
from marserve.frontend.http.router import ANY_OTHER, Route
from marserve.frontend.rest.shared_routes import shared_routes
from marserve.frontend.security.tokens import TokenStore

INFERENCE_FIRSTS = ("models", "v1", "v2", "predictions", ANY_OTHER)
MANAGEMENT_FIRSTS = ("models", "v1", "v2", "token")


def say(word: str) -> Callable[[HttpRequest], Any]:
    async def serve(_request: HttpRequest) -> HttpResponse:
        return json_response(word)

    return serve


INFERENCE = {first: Route(say("inference"), "inference") for first in INFERENCE_FIRSTS}
MANAGEMENT = {first: Route(say("management"), "management") for first in MANAGEMENT_FIRSTS}

CASES = [
    ("GET", "/models", "management"),
    ("POST", "/models", "management"),
    ("GET", "/models/m", "management"),
    ("GET", "/models/m/1", "management"),
    ("PUT", "/models/m/1", "management"),
    ("DELETE", "/models/m/1", "management"),
    ("PUT", "/models/m/1/set-default", "management"),
    ("PUT", "/models/m/invoke/set-default", "management"),
    ("GET", "/models/invoke", "management"),
    ("POST", "/models/m/invoke", "inference"),
    ("GET", "/models/m/invoke", "inference"),
    ("GET", "/models/unknown/invoke", "inference"),
    ("POST", "/models/odd/invoke", "inference"),
    ("GET", "/models/odd/invoke", "management"),
    ("PUT", "/models/odd/invoke", "management"),
    ("DELETE", "/models/odd/invoke", "management"),
    ("GET", "/v1/models/m", "management"),
    ("GET", "/v1/models/m:predict", "inference"),
    ("POST", "/v1/models/m:explain", "inference"),
    ("GET", "/v1", "management"),
    ("GET", "/v1/models", "inference"),
    ("GET", "/v1/models/a/b", "management"),
    ("POST", "/v1/chat/completions", "inference"),
    ("POST", "/v1/completions", "inference"),
    ("GET", "/v2", "inference"),
    ("POST", "/v2/models/m/infer", "inference"),
    ("POST", "/v2/repository/index", "inference"),
    ("POST", "/v2/repository/models/m/load", "management"),
    ("GET", "/token", "management"),
    ("GET", "/predictions/m", "inference"),
    ("GET", "/m/predict", "inference"),
]


@pytest.fixture
def shared(registry, make_model):
    registry.add(make_model("odd", "invoke"))
    return shared_routes(INFERENCE, MANAGEMENT, registry)


@pytest.mark.parametrize(("method", "path", "whose"), CASES)
def test_each_path_finds_its_side(method, path, whose, shared):
    answer = fakes.exchange(shared, fakes.request(path, method))
    assert answer.document == whose


@pytest.mark.parametrize(("method", "path", "whose"), CASES)
def test_each_side_keeps_its_own_key(method, path, whose, shared, tmp_path):
    tokens = TokenStore(tmp_path / "key_file.json", 60.0)
    tokens.write()
    keys = json.loads(tokens.path.read_text())
    for kind in ("inference", "management"):
        header = f"Authorization: Bearer {keys[kind]['key']}"
        sent = fakes.request(path, method, b"", header)
        answer = fakes.exchange(shared, sent, tokens=tokens)
        assert answer.status == (200 if kind == whose else 400)


@pytest.mark.parametrize(
    ("path", "status"), [("/models/m/1", 403), ("/models/m/invoke", 200), ("/v1/models/m", 403)]
)
def test_web_pages_are_kept_from_management_only(path, status, shared):
    sent = fakes.request(path, "GET", b"", "Origin: http://evil.example")
    assert fakes.exchange(shared, sent, local_management=True).status == status


def test_without_a_route_for_all_others_they_are_not_found():
    assert fakes.exchange(MANAGEMENT, fakes.request("/other")).status == 404
    assert fakes.exchange(INFERENCE, fakes.request("/other")).status == 200
