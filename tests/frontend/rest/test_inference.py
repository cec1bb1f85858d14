"""Which path asks which model for what, and what the handler gets of it."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from marserve.frontend.serving.readiness import is_server_ready
from marserve.frontend.serving.registry import FailedLoad

Ask = Callable[..., Any]

FORM = "Content-Type: application/x-www-form-urlencoded"
NO_ROUTE = (404, "ResourceNotFoundException")
NO_MODEL = (404, "ModelNotFoundException")
NO_VERSION = (404, "ModelVersionNotFoundException")


def failure(answer: Any) -> tuple[int, str]:
    return answer.status, answer.document["type"]


# -- predictions and explanations ------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "explain"), [("predictions", "False"), ("explanations", "True")])
@pytest.mark.parametrize(
    ("path", "version", "by_version", "url_path"),
    [
        ("m", "1", False, ""),
        ("m/", "1", False, ""),
        ("m/1", "1", True, ""),
        ("m/2", "2", True, ""),
        ("m/2/a", "2", True, "a"),
        ("m/2/a/b%20c/", "2", True, "a/b c"),
        ("m//a", "1", False, "a"),
    ],
)
def test_a_path_names_model_version_and_a_path_for_the_handler(
    kind, explain, path, version, by_version, url_path, ask
):
    asked = ask(f"/{kind}/{path}?q=1").document
    assert (asked["model"], asked["version"], asked["by_version"]) == ("m", version, by_version)
    assert asked["headers"] == {"url_path": url_path, "explain": explain}
    assert asked["parts"] == [["body", ""]]


@pytest.mark.parametrize("kind", ["predictions", "explanations"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", NO_ROUTE),
        ("/", NO_ROUTE),
        ("/x", NO_MODEL),
        ("/x/1", NO_MODEL),
        ("/m/9", NO_VERSION),
        ("/m/9/a", NO_VERSION),
    ],
)
def test_what_is_not_there_is_not_found(kind, path, expected, ask):
    assert failure(ask(f"/{kind}{path}")) == expected


@pytest.mark.parametrize(
    "path", ["/predictions/m", "/explanations/m", "/models/m/invoke", "/m/predict"]
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "QUERY"])
def test_any_method_predicts(path, method, ask):
    assert ask(path, method).document["model"] == "m"


@pytest.mark.parametrize(
    "path",
    [
        "/predictions/m",
        "/predictions/m/2",
        "/explanations/m",
        "/models/m/invoke",
        "/invocations?model_name=m",
        "/m/predict",
        "/v1/models/m:predict",
        "/v2/models/m/infer",
    ],
)
def test_options_describe_the_model_instead(path, ask):
    answer = ask(path, "OPTIONS")
    assert answer.document["info"]["title"] == "RESTful API for: m"


# -- as SageMaker and Multi Model Server ask -------------------------------------------------------

QUERY_PATHS = [
    ("/invocations", [["model_name", "m"]]),
    ("/models/m/invoke", []),
    ("/m/predict", []),
    ("/m/1/predict", []),
]


@pytest.mark.parametrize(("path", "named"), QUERY_PATHS)
def test_the_query_comes_before_the_body_and_no_header_is_added(path, named, ask):
    query = "&".join(["model_name=m"] * len(named) + ["a=1", "b=x+y%21", "b=2", "c"])
    asked = ask(f"{path}?{query}", "POST", b"d=4&a=3", FORM).document
    assert asked["model"] == "m"
    assert asked["parts"] == [*named, ["a", "3"], ["b", "2"], ["c", ""], ["d", "4"]]
    assert asked["headers"] == {}


@pytest.mark.parametrize(("path", "_named"), QUERY_PATHS)
def test_a_query_that_cannot_be_read_is_the_clients_fault(path, _named, ask):
    assert failure(ask(f"{path}?model_name=m&a=%zz")) == (400, "BadRequestException")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/models/x/invoke", NO_MODEL),
        ("/models/m/describe", NO_ROUTE),
        ("/models/m/invoke/more", NO_ROUTE),
        ("/models/m", NO_ROUTE),
        ("/models", NO_ROUTE),
        ("/invocations/m", NO_ROUTE),
        ("/invocations?model_name=x", NO_MODEL),
        ("/x/predict", NO_MODEL),
        ("/m/9/predict", NO_VERSION),
        ("/m/1/a/predict", NO_ROUTE),
        ("/m/explain", NO_ROUTE),
        ("/m", NO_ROUTE),
        ("/ping2", NO_ROUTE),
    ],
)
def test_other_shapes_are_not_found(path, expected, ask):
    assert failure(ask(path)) == expected


def test_the_legacy_path_names_a_version(ask):
    asked = ask("/m/2/predict").document
    assert (asked["version"], asked["by_version"]) == ("2", True)


def test_the_legacy_path_comes_last(ask, registry, make_model):
    for name in ("ping", "models", "predictions", "*"):
        registry.add(make_model(name))
    assert ask("/ping/predict").document == {"status": "Healthy"}
    assert failure(ask("/models/predict")) == NO_ROUTE
    assert failure(ask("/predictions/predict")) == NO_MODEL
    assert ask("/*/predict").document["model"] == "*"


@pytest.mark.parametrize(
    ("at_start", "query", "body", "chosen"),
    [
        ([], "?model_name=m", b"", "m"),
        ([], "?model_name=m", b"model_name=b", "m"),
        ([], "", b"model_name=b", "b"),
        ([], "?model_name=", b"model_name=b", "b"),
        (["a"], "", b"", "a"),
        (["a"], "", b"model_name=b", "a"),
        (["a"], "?model_name=b", b"", "b"),
        (["a", "b"], "", b"model_name=b", "b"),
    ],
)
def test_invocations_find_the_model_in_the_query_at_the_start_or_in_the_form(
    at_start, query, body, chosen, ask, registry, make_model
):
    for name in ("a", "b"):
        for version in ("1", "2"):
            registry.add(make_model(name, version, at_start=name in at_start))
    assert ask(f"/invocations{query}", "POST", body, FORM).document["model"] == chosen


@pytest.mark.parametrize("body", [b"", b"a=1", b"model_name="])
def test_invocations_need_a_model(body, ask):
    answer = ask("/invocations", "POST", body, FORM)
    assert answer.document == {
        "code": 400,
        "type": "BadRequestException",
        "message": "Parameter model_name is required.",
    }


def test_invocations_find_the_model_in_a_multipart_form(ask):
    body = (
        b'--b0\r\nContent-Disposition: form-data; name="model_name"\r\n\r\nm\r\n'
        b'--b0\r\nContent-Disposition: form-data; name="data"; filename="f"\r\n\r\nx\r\n--b0--\r\n'
    )
    asked = ask("/invocations", "POST", body, "Content-Type: multipart/form-data; boundary=b0")
    assert asked.document["parts"] == [["model_name", "m"], ["data", "x"]]


# -- how the server is -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/ping", "/ping/deeper"])
@pytest.mark.parametrize(
    ("healthy", "status", "word"), [(True, 200, "Healthy"), (False, 500, "Unhealthy")]
)
def test_ping_asks_whether_default_versions_are_healthy(
    path, healthy, status, word, ask, registry, make_model
):
    registry.add(make_model("a", is_healthy=healthy))
    registry.add(make_model("m", "3", is_healthy=False))
    answer = ask(path, "GET")
    assert (answer.status, answer.document) == (status, {"status": word})


def test_ready_names_the_models_that_lack_loaded_workers(ask, registry, make_model):
    registry.add(make_model("full", ready=2, min_workers=2))
    registry.add(make_model("empty", ready=0, min_workers=0))
    registry.add(make_model("m", "3", ready=0))  # not the default
    answer = ask("/ready", "GET")
    assert (answer.status, answer.document) == (200, {"status": "Ready"})
    registry.add(make_model("z", ready=1, min_workers=2))
    registry.add(make_model("b", ready=0))
    answer = ask("/ready", "GET")
    assert answer.status == 503
    assert answer.document == {"status": "Not ready", "models": ["b", "z"]}


class Name(str):
    """A name that counts how often it is compared for its order."""

    __slots__ = ()
    comparisons = 0

    def __lt__(self, other: str) -> bool:
        Name.comparisons += 1
        return super().__lt__(other)


@pytest.mark.parametrize("is_of_catalog", [True, False])
def test_thousands_of_models_that_are_missing_do_not_make_a_probe_slow(
    is_of_catalog, ask, registry
):
    names = [Name(f"m{number}") for number in range(10_000, 20_000)]
    random.Random(7).shuffle(names)
    if is_of_catalog:
        registry.catalog_progress.awaited.update(names)
    for name in names:
        registry.failed.append(FailedLoad(name, "", "why", is_awaited=not is_of_catalog))
    Name.comparisons = 0
    assert not is_server_ready(registry)
    assert Name.comparisons == 0
    answer = ask("/ready", "GET")
    assert (answer.status, answer.document["models"]) == (503, sorted(names)[:100])
    Name.comparisons = 0
    ask("/ready", "GET")
    assert Name.comparisons < 2 * len(names)


def test_a_server_about_to_stop_is_neither_ready_nor_healthy_and_still_answers(ask, registry):
    registry.is_leaving = True
    answer = ask("/ready", "GET")
    assert (answer.status, answer.document) == (503, {"status": "Stopping"})
    answer = ask("/ping", "GET")
    assert (answer.status, answer.document) == (500, {"status": "Unhealthy"})
    assert ask("/predictions/m").document["model"] == "m"


def test_ready_tells_of_one_model(ask, registry, make_model):
    registry.add(make_model("z", ready=0))
    answer = ask("/ready?model=m", "GET")
    assert (answer.status, answer.document) == (200, {"status": "Ready", "model": "m"})
    answer = ask("/ready?model=z", "GET")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    reason = "0 of 1 workers are ready."
    assert answer.document == {"status": "Not ready", "model": "z", "reason": reason}
    assert failure(ask("/ready?model=x", "GET")) == NO_MODEL
    assert failure(ask("/ready?model=m&version=9", "GET")) == NO_VERSION
    registry.is_leaving = True
    answer = ask("/ready?model=m", "GET")
    assert (answer.status, answer.document["status"]) == (503, "Stopping")


def test_a_full_model_is_not_ready_and_the_server_is(ask, registry):
    model = registry.find("m", "2")
    model.full, model.expected_seconds = "Why.", 2.5
    answer = ask("/ready?model=m&version=2", "GET")
    assert (answer.status, answer.headers["retry-after"]) == (503, "3")
    assert answer.document == {"status": "Full", "model": "m", "reason": "Why."}
    assert ask("/ready?model=m", "GET").status == 200
    assert ask("/ready", "GET").status == 200


def test_ready_is_one_path(ask):
    assert failure(ask("/ready/m")) == NO_ROUTE
