"""KServe's protocols, with and without what only ``ts_open_inference_protocol`` offers."""

import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from marserve.frontend.version import __version__

Ask = Callable[..., Any]


@pytest.mark.parametrize(("verb", "explain"), [("predict", "False"), ("explain", "True")])
def test_v1_asks_the_default_version_and_says_whether_to_explain(verb, explain, ask):
    asked = ask(f"/v1/models/m:{verb}?q=1", "POST", b'{"instances": []}').document
    assert (asked["model"], asked["version"], asked["by_version"]) == ("m", "1", False)
    assert asked["parts"] == [["body", '{"instances": []}']]
    assert asked["headers"] == {"explain": explain}


@pytest.mark.parametrize(
    ("path", "type_"),
    [
        ("/v1/models/x:predict", "ModelNotFoundException"),
        ("/v1/models/m:x:predict", "ModelNotFoundException"),
        ("/v1/models/m", "ResourceNotFoundException"),
        ("/v1/models/m:train", "ResourceNotFoundException"),
        ("/v1/models/:predict", "ResourceNotFoundException"),
        ("/v1/models/m:predict/1", "ResourceNotFoundException"),
        ("/v1/m:predict", "ResourceNotFoundException"),
        ("/v1", "ResourceNotFoundException"),
    ],
)
def test_other_paths_of_v1_are_not_found(path, type_, ask):
    answer = ask(path)
    assert (answer.status, answer.document["type"]) == (404, type_)


@pytest.fixture
def ask_all(ask):
    return lambda path: ask(path, "GET", open_inference=True)


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize(("verb", "explain"), [("infer", "False"), ("explain", "True")])
def test_v2_asks_the_default_version_and_says_whether_to_explain(verb, explain, is_on, ask):
    answer = ask(f"/v2/models/m/{verb}?q=1", "POST", b'{"inputs": []}', open_inference=is_on)
    asked = answer.document
    assert (asked["model"], asked["version"], asked["by_version"]) == ("m", "1", False)
    assert asked["parts"] == [["body", '{"inputs": []}']]
    assert asked["headers"] == {"explain": explain}


@pytest.mark.parametrize("verb", ["infer", "explain"])
@pytest.mark.parametrize(
    ("coding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_v2_decodes_bodies_and_v1_does_not(verb, coding, encode, ask):
    headers = f"Content-Encoding: {coding}", "Content-Type: application/json"
    body = encode(b'{"inputs": []}')
    asked = ask(f"/v2/models/m/{verb}", "POST", body, *headers).document
    assert asked["parts"] == [["body", '{"inputs": []}']]
    refused = ask(f"/v2/models/m/{verb}", "POST", b"", "Content-Encoding: br", open_inference=True)
    assert refused.status == 415
    assert refused.document["error"].startswith("Content-Encoding 'br' is not supported")
    assert ask("/v1/models/m:predict", "POST", b"as it is", *headers).document["parts"] == [
        ["body", "as it is"]
    ]


@pytest.mark.parametrize(("verb", "explain"), [("infer", "False"), ("explain", "True")])
def test_a_version_can_be_asked(verb, explain, ask_all):
    asked = ask_all(f"/v2/models/m/versions/2/{verb}").document
    assert (asked["version"], asked["by_version"]) == ("2", True)
    assert asked["headers"] == {"explain": explain}


ONLY_OPEN_INFERENCE = [
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/m",
    "/v2/models/m/ready",
    "/v2/models/m/versions/1",
    "/v2/models/m/versions/1/ready",
    "/v2/models/m/versions/1/infer",
]


@pytest.mark.parametrize("path", ONLY_OPEN_INFERENCE)
def test_what_torchserve_hides_while_the_protocol_is_off(path, ask):
    answer = ask(path)
    assert (answer.status, answer.document["type"]) == (404, "ResourceNotFoundException")
    assert ask(path, open_inference=True).status == 200


@pytest.mark.parametrize(
    ("path", "type_"),
    [
        ("/v2/models/x", "ModelNotFoundException"),
        ("/v2/models/x/ready", "ModelNotFoundException"),
        ("/v2/models/x/infer", "ModelNotFoundException"),
        ("/v2/models/m/versions/9", "ModelVersionNotFoundException"),
        ("/v2/models/m/versions/9/ready", "ModelVersionNotFoundException"),
        ("/v2/models/m/versions/9/infer", "ModelVersionNotFoundException"),
        ("/v2/models/m/versions", "ResourceNotFoundException"),
        ("/v2/models/m/versions/1/train", "ResourceNotFoundException"),
        ("/v2/models/m/train", "ResourceNotFoundException"),
        ("/v2/models/m/infer/1", "ResourceNotFoundException"),
        ("/v2/models", "ResourceNotFoundException"),
        ("/v2/health", "ResourceNotFoundException"),
        ("/v2/health/well", "ResourceNotFoundException"),
    ],
)
def test_other_paths_of_v2_are_not_found(path, type_, ask_all):
    answer = ask_all(path)
    assert (answer.status, answer.document["type"]) == (404, type_)


@pytest.mark.parametrize("path", ["/v2/models/x/infer", "/v2/models", "/v2/health/well"])
def test_all_of_the_protocol_adds_its_own_member_to_an_error(path, ask, ask_all):
    plain, ours = ask(path).document, ask_all(path).document
    assert ours == {**plain, "error": plain["message"]}


def test_elsewhere_errors_are_as_they_were(ask_all):
    assert "error" not in ask_all("/predictions/x").document


def test_the_server_is_described_in_torchserves_spelling_and_the_protocols(ask_all):
    told = ask_all("/v2").document
    assert list(told.items())[:3] == [
        ("name", "Torchserve"),
        ("version", __version__),
        ("extenstion", ["kserve", "kubeflow"]),
    ]
    assert {"kserve", "kubeflow", "binary_tensor_data"} <= set(told["extensions"])


@pytest.mark.parametrize("path", ["/v2/models/m", "/v2/models/m/versions/2"])
def test_a_model_is_described_by_its_versions(path, ask_all):
    assert ask_all(path).document == {
        "name": "m",
        "versions": ["1", "2"],
        "platform": "",
        "inputs": [],
        "outputs": [],
    }


def test_the_server_is_ready_once_every_model_has_its_workers(ask_all, registry, make_model):
    ready = ask_all("/v2/health/ready")
    assert (ready.status, ready.document) == (200, {"ready": True})
    registry.add(make_model("b", ready=0))
    ready = ask_all("/v2/health/ready")
    assert (ready.status, ready.document) == (503, {"ready": False})
    assert ask_all("/v2/health/live").document == {"live": True}


@pytest.mark.parametrize(
    ("workers", "ready"),
    [
        ({"ready": 1, "min_workers": 1}, True),
        ({"ready": 1, "min_workers": 2}, False),
        ({"ready": 0, "min_workers": 0}, False),
        ({"ready": 1, "min_workers": 0}, True),
    ],
)
def test_a_version_is_ready_once_it_can_answer(workers, ready, ask_all, registry, make_model):
    registry.add(make_model("b", "1", **workers))
    for path in ("/v2/models/b/ready", "/v2/models/b/versions/1/ready"):
        answer = ask_all(path)
        assert (answer.status, answer.document) == (
            200 if ready else 503,
            {"name": "b", "ready": ready},
        )
