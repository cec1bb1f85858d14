"""The description of a listener: OpenAPI 3.0 documents for programs, a page for browsers.

The operations are in openapi/*.yaml, one file per listener. References to shared parameters,
answers and bodies are resolved, because clients are generated from documents of that form.
``$settings`` is replaced by the settings of models, and ``$parameters`` by the
parameters of a query as members of an object. Documents share their parts, so they must not be
changed.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from marserve.frontend.configuration.model_schema import BATCHING, LIVE, REGISTERED
from marserve.frontend.configuration.saved_models import SAVED
from marserve.frontend.configuration.setting import Setting
from marserve.frontend.configuration.setting_kinds import Json, whole
from marserve.frontend.errors import MethodNotAllowed, RouteNotFound
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse, json_response, text_response
from marserve.frontend.http.router import Route
from marserve.frontend.operations.describe import DESCRIBED
from marserve.frontend.version import __version__

_FOLDER = Path(__file__).with_name("openapi")
_SCHEMAS = "#/components/schemas/"
_TITLE = "marserve APIs"
_ABOUT = "A model server for the archives and clients of TorchServe."
_LINKS = {
    "Inference": {"/ping": "whether it is healthy", "/ready": "whether every model can answer now"},
    "Management": {
        "/dashboard": "the dashboard",
        "/models": "the models",
        "/loggers": "the loggers and their levels",
    },
    "Metrics": {"/metrics": "the metrics, for Prometheus"},
}
# Further files while the Open Inference Protocol is enabled.
_OPEN_INFERENCE = {"Management": "repository", "Inference": "open_inference"}
# By their names in the files of openapi/.
_GROUPS = {
    "batching": tuple(row for row in REGISTERED if row in BATCHING),
    "others": tuple(row for row in REGISTERED if row not in BATCHING),
    "live": LIVE,
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>marserve</title>
<style>body {{ font: 16px/1.5 sans-serif; margin: 3em auto; max-width: 40em }}</style>
<h1>marserve {version}</h1>
<p>A model server for TorchServe's archives and clients. This address serves {serves}.</p>
<ul>
{links}</ul>
</html>
"""


def description_routes(listener: str, *, open_inference: bool) -> Mapping[str, Route]:
    """``/`` and ``/api-description``, which every listener has and no key guards.

    The name of the ``listener`` says what it serves: "Inference and Management".
    """
    serves = listener.split(" and ")
    page = front_page(serves)

    async def root(request: HttpRequest) -> HttpResponse:
        if request.segments:  # a path that begins with two slashes
            raise RouteNotFound
        if request.method == "OPTIONS":
            return await description(request)
        if _is_browser(request):
            return text_response(page, "text/html; charset=utf-8")
        raise MethodNotAllowed

    async def description(request: HttpRequest) -> HttpResponse:
        if len(request.segments) > 1:
            raise RouteNotFound
        return json_response(describe_listener(serves, open_inference=open_inference))

    return {"": Route(root), "api-description": Route(description)}


def describe_listener(serves: Collection[str], *, open_inference: bool = False) -> Json:
    """Return the document of a listener that serves some of Inference, Management and Metrics."""
    files = [name.lower() for name in _LINKS if name in serves]
    if open_inference:
        files += [file for api, file in _OPEN_INFERENCE.items() if api in serves]
    paths: Json = {}
    for file in files:
        for path, operations in _load(file)["paths"].items():
            paths[path] = {**paths.get(path, {}), **operations}
    return _document({"title": _TITLE, "description": _ABOUT, "version": __version__}, paths)


def describe_model_inference(name: str) -> Json:
    """Return the document of the predictions of one model."""
    paths = _load("inference")["paths"]
    segment = quote(name, safe="")
    predict = paths["/predictions/{model_name}"]["post"]
    predict = {**predict, "parameters": predict["parameters"][1:]}  # the name is in the path
    misspelt = {
        **predict,
        "summary": "A misspelt path that old clients read here; nothing answers there.",
        "operationId": "prediction",
        "deprecated": True,
    }
    kserve = ("/v1/models/{model_name}:predict", "/v2/models/{model_name}/infer")
    chosen = {
        f"/prediction/{segment}": {"post": misspelt},
        f"/predictions/{segment}": {"post": predict},
        **{path: paths[path] for path in kserve},
    }
    return _document(_inference_info(name), _with_model(chosen, name))


def describe_model_management(name: str) -> Json:
    """Return the document of the management of one model."""
    chosen = _below("/models/{model_name}", "management")
    return _document(_management_info(name), _with_model(chosen, name))


def describe_workflow_inference(name: str) -> Json:
    """Return the document of the runs of a workflow."""
    return _document(_inference_info(name), _below("/wfpredict", "inference"))


def describe_workflow_management(name: str) -> Json:
    """Return the document of the management of one workflow."""
    return _document(_management_info(name), _below("/workflows/", "management"))


def _below(start: str, file: str) -> Json:
    return {path: of for path, of in _load(file)["paths"].items() if path.startswith(start)}


def _inference_info(name: str) -> Json:
    return {"title": f"RESTful API for: {name}", "version": "1.0.0"}


def _management_info(name: str) -> Json:
    return {"title": f"RESTful Management API for: {name}", "version": __version__}


def front_page(serves: Sequence[str]) -> str:
    """Return the page of a listener that ``serves`` these APIs."""
    links = {"/api-description": "the API of this address, as an OpenAPI document"}
    for api in serves:
        links |= _LINKS[api]
    items = (f'<li><a href="{path}">{path}</a>: {what}</li>\n' for path, what in links.items())
    return _PAGE.format(
        version=escape(__version__), serves=" and ".join(serves).lower(), links="".join(items)
    )


def _is_browser(request: HttpRequest) -> bool:
    """Return whether the client prefers a page; programs accept any type, or send no header."""
    accepted = request.headers.get("accept", "").lower()
    return request.method in ("GET", "HEAD") and "text/html" in accepted


@cache
def _load(name: str) -> Json:
    """Return a file of openapi/ with all references resolved except those to schemas."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 20 times as fast, where it is built
    document: Json = yaml.load((_FOLDER / f"{name}.yaml").read_bytes(), loader)  # noqa: S506 - safe
    if name == "components":
        return document["components"]  # type: ignore[no-any-return]
    resolved: Json = _resolved(document["components"] if name == "schemas" else document)
    return resolved


def _resolved(node: Any) -> Any:
    if isinstance(node, list):
        return [found for item in node for found in _resolved_items(item)]
    if not isinstance(node, dict):
        return node
    if "$parameters" in node:
        return {
            each["name"]: {"description": each["description"], **each["schema"]}
            for each in _resolved(node["$parameters"])
        }
    if "$settings" in node.get("properties", ()):
        properties = {key: of for key, of in node["properties"].items() if key != "$settings"}
        required = [*node["required"], *(row.key for row in SAVED if row.default is not None)]
        node = {**node, "required": required, "properties": {**_described_schemas(), **properties}}
    reference = node.get("$ref", _SCHEMAS)
    if reference.startswith(_SCHEMAS):
        return {key: _resolved(value) for key, value in node.items()}
    _, _, kind, name = reference.split("/")
    return _load("components")[kind][name]


def _resolved_items(item: Any) -> list[Any]:
    if isinstance(item, dict) and "$settings" in item:
        return _setting_parameters(item["$settings"])
    return [_resolved(item)]


def _setting_parameters(group: str) -> list[Json]:
    rows, is_registration = _GROUPS[group], group != "live"
    parameters = [_parameter(row, is_registration=is_registration) for row in rows]
    for row in rows:
        for name in row.parameters[1:]:
            same = f"The same as `{row.parameter}`."
            parameters.append({**_parameter(row), "name": name, "description": same})
    return [{**each, "required": False} for each in parameters] if is_registration else parameters


def _described_schemas() -> dict[str, Json]:
    return {row.key: {"description": row.help, **row.kind.schema} for row in DESCRIBED}


def _parameter(row: Setting, *, is_registration: bool = False) -> Json:
    text, schema = row.help, row.kind.query_schema or row.kind.schema
    if is_registration and row.as_configured:
        # Numbers below the smallest useful value mean "as configured" in TorchServe.
        numbers = ", ".join(map(str, row.as_configured))
        text = f"{text.removesuffix('.')}; {numbers}: as configured."
        lowest = row.as_configured[-1]
        schema = {**whole(lowest).schema, "default": lowest}
    return {"name": row.parameter, "in": "query", "description": text, "schema": schema}


def _with_model(paths: Json, name: str) -> Json:
    """Return the paths with ``model_name`` fixed."""

    def fixed(parameter: Json) -> Json:
        if parameter["name"] != "model_name":
            return parameter
        return {**parameter, "schema": {**parameter["schema"], "enum": [name]}}

    return {
        path: {
            method: {**operation, "parameters": [*map(fixed, operation["parameters"])]}
            for method, operation in operations.items()
        }
        for path, operations in paths.items()
    }


def _document(info: Json, paths: Json) -> Json:
    """Return a document of these paths, with their schemas and security schemes."""
    names = _references(paths)
    pending = list(names)
    schemas = _load("schemas")["schemas"]
    while pending:
        found = _references(schemas[pending.pop()]) - names
        names |= found
        pending += found
    operations = [operation for of in paths.values() for operation in of.values()]
    keys = {key for operation in operations for needed in operation["security"] for key in needed}
    security = _load("components")["securitySchemes"]
    return {
        "openapi": "3.0.1",
        "info": info,
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in schemas.items() if name in names},
            "securitySchemes": {key: scheme for key, scheme in security.items() if key in keys},
        },
    }


def _references(node: Json) -> set[str]:
    return set(re.findall(rf'"{_SCHEMAS}(\w+)"', json.dumps(node)))
