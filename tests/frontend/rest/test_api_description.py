"""The documents and the routes they are about; that answers keep to them is seen on a server."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import fakes
import pytest
from openapi_spec_validator import OpenAPIV30SpecValidator

from marserve.frontend.configuration.model_schema import BATCH_POLICIES
from marserve.frontend.errors import ModelNotFound
from marserve.frontend.http.router import ANY_OTHER, Route
from marserve.frontend.logs.levels import LEVELS
from marserve.frontend.operations.dashboard import Dashboard
from marserve.frontend.operations.management import ModelManagement
from marserve.frontend.operations.open_inference_models import OpenInferenceModels
from marserve.frontend.operations.requests import RequestLines
from marserve.frontend.operations.workflows import WorkflowManagement
from marserve.frontend.rest.api_description import (
    describe_listener,
    describe_model_inference,
    describe_model_management,
    describe_workflow_inference,
    describe_workflow_management,
    description_routes,
)
from marserve.frontend.rest.dashboard import dashboard_routes
from marserve.frontend.rest.endpoints import metrics_routes
from marserve.frontend.rest.inference import inference_routes
from marserve.frontend.rest.kserve import kserve_routes
from marserve.frontend.rest.loggers import logger_routes
from marserve.frontend.rest.management import management_routes
from marserve.frontend.rest.open_inference import repository_routes
from marserve.frontend.rest.workflows import (
    workflow_inference_routes,
    workflow_management_routes,
)
from marserve.frontend.security.tokens import TokenStore
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.gpu import GpuReader
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.tracing.time_lines import TimeLines
from marserve.frontend.version import __version__
from marserve.frontend.workflows.workflow import WorkflowRegistry

_LISTENERS = {
    "inference": describe_listener(["Inference"]),
    "management": describe_listener(["Management"]),
    "metrics": describe_listener(["Metrics"]),
    "shared": describe_listener(["Inference", "Management", "Metrics"]),
    "open inference": describe_listener(["Inference"], open_inference=True),
    "open management": describe_listener(["Management"], open_inference=True),
}
_MODELS = {
    "inference of a model": describe_model_inference("m"),
    "inference of a model with an odd name": describe_model_inference("a b/{c}"),
    "management of a model": describe_model_management("m"),
    "runs of a workflow": describe_workflow_inference("w"),
    "management of a workflow": describe_workflow_management("w"),
}
_ALL = {**_LISTENERS, **_MODELS}

every_document = pytest.mark.parametrize("document", _ALL.values(), ids=_ALL)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def by_name(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {found["operationId"]: (method, path) for path, method, found in operations(document)}


def query_of(name: str) -> dict[str, dict[str, Any]]:
    for _, _, operation in operations(_LISTENERS["management"]):
        if operation["operationId"] == name:
            return {each["name"]: each for each in operation["parameters"] if each["in"] == "query"}
    raise AssertionError(name)


# -- every document --------------------------------------------------------------------------------


@every_document
def test_it_is_valid_openapi(document):
    OpenAPIV30SpecValidator(document).validate()
    assert document["openapi"] == "3.0.1"


@every_document
def test_it_survives_json(document):
    assert json.loads(json.dumps(document)) == document


@every_document
def test_schemas_are_those_referred_to(document):
    referred = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert set(document["components"]["schemas"]) == set(referred)


@every_document
def test_what_is_asked_for_is_described(document):
    for path, method, operation in operations(document):
        assert operation["summary"]
        for each in operation["parameters"]:
            assert each["description"], f"{method} {path}: {each['name']}"
            assert each["schema"].keys() & {"type", "anyOf"}


# -- routes ----------------------------------------------------------------------------------------


class EmptyManager:
    """A model manager without models."""

    def __getattr__(self, name: str) -> Any:
        async def change(*_arguments: Any, **_options: Any) -> None:
            raise ModelNotFound("nobody")

        return change


def routes_of(listener: str, tokens: TokenStore) -> Mapping[str, Route]:
    registry = ModelRegistry()
    routes = dict(description_routes("Inference", open_inference=True))
    if listener == "open inference":
        routes |= inference_routes(registry, 100)
        routes |= workflow_inference_routes(WorkflowRegistry(), 100, routes[ANY_OTHER])
        routes |= kserve_routes(registry, 100, open_inference=True)
    else:
        manager: Any = EmptyManager()
        operations = ModelManagement(manager, registry, GpuReader(), model_api=True)
        routes |= management_routes(operations, tokens=tokens, max_request_bytes=100)
        routes |= logger_routes()
        dashboard = Dashboard(registry, WorkflowRegistry(), GpuReader())
        dashboard.close()  # a stream of events ends then
        lines = RequestLines(TimeLines(), registry)
        routes |= dashboard_routes(dashboard, lines, registry, 100)
        workflows = WorkflowManagement(WorkflowRegistry(), manager, model_api=True)
        routes |= workflow_management_routes(workflows, 100)
        if listener == "open management":
            routes |= repository_routes(OpenInferenceModels(registry, operations))
    return {**routes, **metrics_routes(Metrics("host"), ModelRegistry())}


@pytest.fixture
def tokens(tmp_path):
    store = TokenStore(tmp_path / "key_file.json", 60.0)
    store.write()
    return store


served = pytest.mark.parametrize("listener", ["open inference", "management", "open management"])


def answer_of(method: str, path: str, listener: str, tokens: TokenStore) -> tuple[int, str]:
    """Status and kind of failure; the model of the path is not there."""
    target = re.sub("{logger_name}", "root", path)
    target = re.sub("{[a-z_]+}", "nobody", target)
    sent = fakes.request(target, method.upper())
    answer = fakes.exchange(routes_of(listener, tokens), sent)
    return answer.status, answer.document.get("type", "") if answer.status >= 400 else ""


@served
def test_what_is_described_is_served(listener, tokens):
    for path, method, _ in operations(_LISTENERS[listener]):
        if path in ("/metrics", "/api-description", "/"):
            continue  # no JSON failures, and asked below
        status, kind = answer_of(method, path, listener, tokens)
        assert (status, kind) != (404, "ResourceNotFoundException"), f"{method} {path}"
        assert status != 405, f"{method} {path}"
    for method, path in _COMMON.values():
        sent = fakes.request(path, method.upper())
        assert fakes.exchange(routes_of(listener, tokens), sent).status == 200


@served
def test_what_is_served_is_described(listener, tokens):
    firsts = {path.split("/")[1] for path in _LISTENERS[listener]["paths"]}
    described = {ANY_OTHER if first.startswith("{") else first for first in firsts}
    routes = routes_of(listener, tokens)
    assert set(routes) == described


def test_methods_that_are_not_described_are_refused(tokens):
    for path, methods in _LISTENERS["management"]["paths"].items():
        if path in ("/metrics", "/api-description", "/", "/token"):
            continue  # any method reads them
        if path in ("/models/{model_name}/batches", "/workflows/{workflow_name}/runs"):
            continue  # mean a version of that name, or the workflow itself
        for method in {"get", "post", "put", "delete", "patch"} - methods.keys():
            answer = answer_of(method, path, "management", tokens)
            assert answer[0] == 405, f"{method} {path}"


def test_words_to_choose_from_are_those_of_the_server():
    schema = query_of("setLevel")["level"]["schema"]
    assert schema["enum"] == [*LEVELS, "inherit"]
    for name in ("registerModel", "setAutoScale"):
        assert query_of(name)["batch_policy"]["schema"]["enum"] == list(BATCH_POLICIES)
    model = _LISTENERS["management"]["components"]["schemas"]["Model"]["properties"]
    assert model["batchPolicy"]["enum"] == list(BATCH_POLICIES)


# -- listeners -------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", _LISTENERS.values(), ids=_LISTENERS)
def test_listeners_share_title_description_and_version(document):
    assert document["info"] == {
        "title": "marserve APIs",
        "description": "A model server for the archives and clients of TorchServe.",
        "version": __version__,
    }


_MODEL = "/models/{model_name}"
_VERSION = _MODEL + "/{model_version}"
_COMMON = {
    "apiDescription": ("options", "/"),
    "api-description": ("get", "/api-description"),
    "metrics": ("get", "/metrics"),
}
_NAMES_OF_TORCHSERVE = {
    "inference": {
        **_COMMON,
        "ping": ("get", "/ping"),
        "predictions": ("post", "/predictions/{model_name}"),
        "version_predictions": ("post", "/predictions/{model_name}/{model_version}"),
    },
    "management": {
        **_COMMON,
        "listModels": ("get", "/models"),
        "registerModel": ("post", "/models"),
        "describeModel": ("get", _MODEL),
        "setAutoScale": ("put", _MODEL),
        "unregisterModel": ("delete", _MODEL),
        "version_describeModel": ("get", _VERSION),
        "version_setAutoScale": ("put", _VERSION),
        "version_unregisterModel": ("delete", _VERSION),
        "setDefault": ("put", _VERSION + "/set-default"),
    },
}


@pytest.mark.parametrize("listener", _NAMES_OF_TORCHSERVE)
def test_generated_clients_find_torchserves_operations(listener):
    assert _NAMES_OF_TORCHSERVE[listener].items() <= by_name(_LISTENERS[listener]).items()
    assert _NAMES_OF_TORCHSERVE[listener].items() <= by_name(_LISTENERS["shared"]).items()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/{model_name}:predict",
        "/v1/models/{model_name}:explain",
        "/v2/models/{model_name}/infer",
        "/v2/models/{model_name}/explain",
        "/explanations/{model_name}",
        "/explanations/{model_name}/{model_version}",
        "/explanations/{model_name}/{model_version}/{url_path}",
        "/predictions/{model_name}/{model_version}/{url_path}",
        "/invocations",
        "/models/{model_name}/invoke",
        "/{model_name}/predict",
        "/{model_name}/{model_version}/predict",
    ],
)
def test_every_way_to_predict_is_described(path):
    operation = _LISTENERS["inference"]["paths"][path]["post"]
    assert operation["security"] == [{"inference_key": []}, {}]
    assert {"200", "400", "404", "413", "500", "503", "507", "default"} <= set(
        operation["responses"]
    )


_V2 = "/v2/models/{model_name}"
_OPEN_INFERENCE = {
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    _V2,
    f"{_V2}/ready",
    *(f"{_V2}/versions/{{model_version}}{verb}" for verb in ("", "/ready", "/infer", "/explain")),
    *(
        f"{_V2}{version}/{verb}"
        for version in ("", "/versions/{model_version}")
        for verb in ("config", "stats")
    ),
    "/v2/models/stats",
    "/v2/repository/index",
}
_REPOSITORY = {
    "/v2/repository/index",
    *(f"/v2/repository/models/{{model_name}}/{verb}" for verb in ("load", "unload")),
}


def test_the_open_inference_protocol_is_described_where_it_is_on():
    described = set(_LISTENERS["open inference"]["paths"])
    assert described - set(_LISTENERS["inference"]["paths"]) == _OPEN_INFERENCE
    managed = set(_LISTENERS["open management"]["paths"])
    assert managed - set(_LISTENERS["management"]["paths"]) == _REPOSITORY


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/ready", []),
        ("/v2/health/ready", [{"inference_key": []}, {}]),
        (f"{_V2}/ready", [{"inference_key": []}, {}]),
    ],
)
def test_who_is_not_ready_says_so_with_503(path, key):
    operation = _LISTENERS["open inference"]["paths"][path]["get"]
    assert {"200", "503"} <= operation["responses"].keys()
    assert operation["security"] == key


def test_listeners_that_share_an_address_describe_what_they_serve():
    both = describe_listener(["Management", "Metrics"])["paths"]
    metrics = _LISTENERS["metrics"]["paths"]
    assert both == {**_LISTENERS["management"]["paths"], **metrics}
    assert "404" not in metrics["/metrics"]["get"]["responses"]


def test_the_metrics_listener_offers_metrics_only():
    assert list(_LISTENERS["metrics"]["paths"]) == ["/metrics"]


def test_the_shared_listener_offers_the_union():
    both = by_name(_LISTENERS["inference"]) | by_name(_LISTENERS["management"])
    del both["openaiModel"]  # on that path management answers, as KServe
    assert by_name(_LISTENERS["shared"]) == both


def test_predictions_take_any_body_and_take_some_apart():
    predict = _LISTENERS["inference"]["paths"]["/predictions/{model_name}"]["post"]
    assert {
        "*/*",
        "application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
    } <= set(predict["requestBody"]["content"])


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("url", None),
        ("model_name", None),
        ("handler", None),
        ("runtime", None),
        ("batch_size", -1),
        ("max_batch_delay", -100),
        ("batch_policy", None),
        ("max_latency_ms", None),
        ("num_requests", None),
        ("compiled_batch_sizes", None),
        ("job_queue_size", None),
        ("initial_workers", None),
        ("synchronous", True),
        ("response_timeout", -1),
        ("startup_timeout", -1),
        ("s3_sse_kms", False),
    ],
)
def test_register_takes_it_in_the_query_or_in_json(name, default):
    parameter = query_of("registerModel")[name]
    body = _LISTENERS["management"]["paths"]["/models"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert parameter["schema"].get("default") == default
    assert parameter["required"] == (name == "url") == (name in schema["required"])
    assert schema["properties"][name]["type"] == parameter["schema"]["type"]


def test_scale_takes_the_version_in_the_query_unless_it_is_in_the_path():
    query, by_version = query_of("setAutoScale"), query_of("version_setAutoScale")
    assert set(query) - set(by_version) == {"model_version"}
    assert query["min_worker"]["schema"].items() >= {"default": 1, "minimum": 0}.items()
    assert query["synchronous"]["schema"]["default"] is False
    assert query["number_gpu"]["deprecated"]


@pytest.mark.parametrize(
    ("name", "key"),
    [("ping", "inference_key"), ("listModels", "management_key"), ("renewToken", "api_key")],
)
def test_a_key_is_needed_unless_authorization_is_off(name, key):
    shared = _LISTENERS["shared"]
    method, path = by_name(shared)[name]
    assert shared["paths"][path][method]["security"] == [{key: []}, {}]
    scheme = shared["components"]["securitySchemes"][key]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")


@pytest.mark.parametrize("name", _COMMON)
def test_descriptions_and_metrics_are_for_everybody(name):
    method, path = _COMMON[name]
    assert _LISTENERS["shared"]["paths"][path][method]["security"] == []


# -- models ----------------------------------------------------------------------------------------


def test_a_models_document_has_torchserves_misspelt_path_and_the_true_one():
    document = describe_model_inference("m")
    assert document["info"] == {"title": "RESTful API for: m", "version": "1.0.0"}
    assert list(document["paths"]) == [
        "/prediction/m",
        "/predictions/m",
        "/v1/models/{model_name}:predict",
        "/v2/models/{model_name}/infer",
    ]
    assert document["paths"]["/prediction/m"]["post"]["deprecated"]


def test_a_models_management_is_all_paths_below_it():
    document = describe_model_management("m")
    assert document["info"] == {"title": "RESTful Management API for: m", "version": __version__}
    assert list(document["paths"]) == [
        _MODEL,
        _VERSION,
        _VERSION + "/set-default",
        _MODEL + "/batches",
        _VERSION + "/batches",
    ]


@pytest.mark.parametrize(
    "document", [describe_model_inference("m"), describe_model_management("m")]
)
def test_in_a_models_document_its_name_is_the_only_one(document):
    names = [
        each["schema"]["enum"]
        for _, _, operation in operations(document)
        for each in operation["parameters"]
        if each["name"] == "model_name"
    ]
    assert names
    assert all(name == ["m"] for name in names)


def test_a_name_that_is_no_path_segment_is_encoded():
    assert "/predictions/a%20b%2F%7Bc%7D" in describe_model_inference("a b/{c}")["paths"]
