"""What the doors offer, as OpenAPI 3.0 documents: one per listener, and two per model.

An `Operation` is one row: path, method, operationId, what it asks for, what it answers. The rows of
each listener stand in files of their own, as do the schemas; here they become documents. Path
parameters are read off the path's template, and the schemas of a document are those its rows refer
to. So a new route is one new row. Documents share their parts: they are to be written out, not
changed.

Titles, operationIds and paths of TorchServe's documents are kept, since clients are generated from
them. Among these are ``/metrics`` on listeners that may not serve it (hence its 404) and the
misspelt ``/prediction/{name}`` of a model's document, beside which stands the path that works.
Beyond TorchServe's, every route that a listener serves is described.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from marserve.frontend.rest.openapi_inference import (
    INFERENCE,
    KSERVE_PREDICT,
    OPEN_INFERENCE,
    PREDICT,
)
from marserve.frontend.rest.openapi_loggers import LOGGER_NAME, LOGGERS
from marserve.frontend.rest.openapi_management import MANAGEMENT, ONE_MODEL
from marserve.frontend.rest.openapi_operations import METRICS, Operation, query_parameter
from marserve.frontend.rest.openapi_schemas import SCHEMAS, Json, text

_OPENAPI = "3.0.1"
_TITLE = "TorchServe APIs"
_ABOUT = "TorchServe is a flexible and easy to use tool for serving deep learning models"
_OF_LISTENER: Mapping[str, Sequence[Operation]] = {
    "Inference": INFERENCE,
    "Management": [*MANAGEMENT, *LOGGERS],
    "Metrics": [METRICS],
}
_PATH_PARAMETERS: Mapping[str, Json] = {
    "logger_name": LOGGER_NAME,
    "model_name": text("Name of the model."),
    "model_version": text("Version of the model; where models are described also `all`."),
    "url_path": text("Handed to the handler; may have more segments."),
}


def describe_listener(
    serves: Collection[str], version: str, *, open_inference: bool = False
) -> Json:
    """The document of a listener.

    Args:
        serves: Which APIs it serves: Inference, Management, Metrics.
        version: Of the server.
        open_inference: Whether the whole Open Inference Protocol is on.

    Returns:
        An OpenAPI 3.0 document, as JSON values.
    """
    rows = [row for name, rows in _OF_LISTENER.items() if name in serves for row in rows]
    if open_inference and "Inference" in serves:
        rows += OPEN_INFERENCE
    return _document({"title": _TITLE, "description": _ABOUT, "version": version}, rows)


def describe_model_inference(name: str) -> Json:
    """How predictions are asked of one model.

    Args:
        name: Of the model.

    Returns:
        An OpenAPI 3.0 document, as JSON values.
    """
    info = {"title": f"RESTful API for: {name}", "version": "1.0.0"}
    segment = quote(name, safe="")
    misspelt = replace(
        PREDICT,
        route=f"post /prediction/{segment}",
        name="prediction",
        summary="A misspelt path that old clients read here; nothing answers there.",
        deprecated=True,
    )
    true = replace(PREDICT, route=f"post /predictions/{segment}")
    return _document(info, [misspelt, true, *KSERVE_PREDICT], model_name=name)


def describe_model_management(name: str, version: str) -> Json:
    """How one model is managed.

    Args:
        name: Of the model.
        version: Of the server.

    Returns:
        An OpenAPI 3.0 document, as JSON values.
    """
    info = {"title": f"RESTful Management API for: {name}", "version": version}
    return _document(info, ONE_MODEL, model_name=name)


def _document(info: Json, operations: Iterable[Operation], **fixed: str) -> Json:
    """The document of these operations; ``fixed`` path parameters have one value only."""
    operations = list(operations)
    paths: Json = {}
    for operation in operations:
        method, path = operation.route.split(" ")
        paths.setdefault(path, {})[method] = _written(operation, fixed)
    return {
        "openapi": _OPENAPI,
        "info": info,
        "paths": paths,
        "components": {
            "schemas": _schemas_of(paths),
            "securitySchemes": _security_schemes(one.key for one in operations if one.key),
        },
    }


def _written(operation: Operation, fixed: Mapping[str, str]) -> Json:
    written: Json = {
        "summary": operation.summary,
        "operationId": operation.name,
        "parameters": [*_path_parameters(operation.route, fixed), *operation.query],
        "responses": {str(status): answer for status, answer in operation.answers.items()},
        "security": _security(operation.key),
    }
    if operation.body is not None:
        written["requestBody"] = operation.body
    if operation.deprecated:
        written["deprecated"] = True
    return written


def _path_parameters(route: str, fixed: Mapping[str, str]) -> Iterator[Json]:
    for name in re.findall(r"{(\w+)}", route):
        one_value = {"enum": [fixed[name]]} if name in fixed else {}
        schema = {**_PATH_PARAMETERS[name], "minLength": 1, **one_value}
        yield query_parameter(name, schema) | {"in": "path", "required": True}


def _security(key: str) -> list[Json]:
    """The key is needed, or nothing at all when authorization is off."""
    return [{f"{key}_key": []}, {}] if key else []


def _security_schemes(keys: Iterable[str]) -> Json:
    return {
        f"{key}_key": {
            "type": "http",
            "scheme": "bearer",
            "description": f"The {key} key of the key file, unless authorization is off.",
        }
        for key in keys
    }


def _schemas_of(paths: Json) -> Json:
    """The schemas these paths refer to, themselves or through others."""
    found: set[str] = set()
    to_visit = set(_references(paths))
    while to_visit:
        name = to_visit.pop()
        found.add(name)
        to_visit |= set(_references(SCHEMAS[name])) - found
    return {name: schema for name, schema in SCHEMAS.items() if name in found}


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        node = list(node.values())
    if isinstance(node, list):
        for one in node:
            yield from _references(one)
