"""Operations: what the rows of an API description are made of, and those every listener has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from marserve.frontend.rest.openapi_schemas import Json, content, listing, ref

#: What an operation answers: by status, or "default".
Answers = Mapping[int | str, Json]

_ERRORS: Mapping[int, str] = {
    400: "The request, a parameter, the archive or the token cannot be used.",
    403: "Refused: the default version of others, or a web page without a token.",
    404: "No such model, version, archive or path.",
    405: "Not with this method, or models may not be changed by request.",
    408: "The body did not come, or a worker could not be ended in time.",
    409: "That version of that model is there already.",
    413: "The body is longer than max_request_size.",
    500: "A worker or the server failed.",
    503: "No worker, no place to wait, the prediction failed, or the server stops.",
    504: "The time of the request was over before it was answered.",
    507: "The worker ran out of memory.",
}


@dataclass(frozen=True)
class Operation:
    """A method and a path, what may be sent there and what comes back.

    Attributes:
        route: Method, in small letters, and template of the path.
        name: The operationId.
        summary: What it does.
        answers: By status.
        key: Which token opens it: inference, management or api; empty for everybody.
        query: Query parameters, and headers that the server itself looks at.
        body: Request body; None when none is read.
        deprecated: Whether there is a better one.
    """

    route: str
    name: str
    summary: str
    answers: Answers
    key: str = ""
    query: Sequence[Json] = ()
    body: Json | None = None
    deprecated: bool = False


def and_by_version(operation: Operation) -> list[Operation]:
    """The operation on a model's default version, and the one on a version in the path."""
    by_version = replace(
        operation,
        route=operation.route + "/{model_version}",
        name=f"version_{operation.name}",
        query=[one for one in operation.query if one["name"] != "model_version"],
    )
    return [operation, by_version]


def query_parameter(name: str, schema: Json, **more: Any) -> Json:
    """A query parameter; the description of its schema moves up to where readers look for it."""
    schema = dict(schema)
    about = schema.pop("description")
    return {"name": name, "in": "query", "description": about, "schema": schema, **more}


def header_parameter(name: str, schema: Json) -> Json:
    """A header of a request, described like a query parameter."""
    return query_parameter(name, schema) | {"in": "header"}


def json_of(description: str, schema: str) -> Json:
    """A response with JSON of a schema, by its name."""
    return {"description": description, **content(ref(schema))}


def errors(*statuses: int) -> Answers:
    """The answers with these statuses that tell of failures."""
    return {status: json_of(_ERRORS[status], "Error") for status in statuses}


def answers(schema: str, *failures: int) -> Answers:
    """Success, with JSON of a schema, and failures with these statuses."""
    return {200: json_of("Done.", schema), **errors(*failures)}


DOCUMENT = Operation("options /", "apiDescription", "Get this document.", answers("Document"))
OLD_DOCUMENT = replace(
    DOCUMENT, route="get /api-description", name="api-description", deprecated=True
)
METRICS = Operation(
    "get /metrics",
    "metrics",
    "Get the metrics; none when they go to the log.",
    {
        200: {"description": "Prometheus text.", **content({"type": "string"}, "text/plain")},
        **errors(400, 404),
    },
    query=[
        query_parameter(
            "name[]", listing({"type": "string"}, "Names of the samples; else all of them.")
        )
    ],
)
