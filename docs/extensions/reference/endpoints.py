"""The endpoints, from the OpenAPI documents of the server."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marserve.frontend.rest.api_description import describe_listener
from reference.markdown import code, sentence, table

Json = Mapping[str, Any]

_LISTENERS = {"Inference": 8080, "Management": 8081, "Metrics": 8082}


def endpoints() -> str:
    """Return all operations: a table for each listener, then each with its parameters."""
    return "\n".join(text for name in _LISTENERS for text in _listener(name))


def _listener(name: str) -> Iterator[str]:
    paths: Json = describe_listener([name], open_inference=True)["paths"]
    found = [
        (f"{method.upper()} {path}", operation)
        for path, operations in sorted(paths.items())
        for method, operation in operations.items()
    ]
    yield f"## {name}, port {_LISTENERS[name]}\n"
    rows = ((f"[`{title}`](#{_anchor(name, of)})", of["summary"]) for title, of in found)
    yield table(["Endpoint", "What it does"], rows)
    for title, operation in found:
        yield f"({_anchor(name, operation)})=\n### `{title}`\n"
        yield from _operation(operation)


def _anchor(listener: str, operation: Json) -> str:
    return f"{listener}-{operation['operationId']}".lower()


def _operation(operation: Json) -> Iterator[str]:
    text = " ".join([operation["summary"], operation.get("description", "")])
    yield sentence(text) + (" For old clients." if operation.get("deprecated") else "") + "\n"
    if parameters := operation["parameters"]:
        yield table(["Parameter", "In", "Type", "Meaning"], map(_parameter, parameters))
    if body := operation.get("requestBody"):
        types = ", ".join(map(code, body["content"]))
        yield f"Body: {types}. {sentence(body['description']) if 'description' in body else ''}\n"
    yield f"Answers: {_answers(operation['responses'])}\n"


def _parameter(parameter: Json) -> Sequence[str]:
    return (
        code(parameter["name"]) + (", required" if _is_remarkable(parameter) else ""),
        parameter["in"],
        _type(parameter["schema"]),
        parameter.get("description", ""),
    )


def _is_remarkable(parameter: Json) -> bool:
    return parameter["in"] != "path" and bool(parameter.get("required"))


def _type(schema: Json) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    words = " or ".join(map(code, map(str, schema["enum"]))) if "enum" in schema else ""
    default = f", default {code(str(schema['default']))}" if "default" in schema else ""
    return (words or str(schema.get("type", "any"))) + default


def _answers(responses: Json) -> str:
    found = (f"{code(status)} {_first(of)}" for status, of in sorted(responses.items()))
    return " · ".join(found)


def _first(response: Json) -> str:
    return str(response.get("description", "")).partition(". ")[0].rstrip(".").lower()
