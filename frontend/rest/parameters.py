"""The parameters of an HTTP request, in its query or its JSON."""

import json
from typing import Any
from urllib.parse import parse_qsl

from marserve.frontend.errors import BadRequest
from marserve.frontend.http.request_bodies import read_body
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.operations.parameters import Parameters

# Its content is written to logs, descriptions and snapshots.
_MAX_JSON_BYTES = 1 << 16


def query_parameters(request: HttpRequest) -> Parameters:
    """Return the parameters in the query; of several with the same name the first counts."""
    return Parameters(dict(reversed(parse_qsl(request.query, keep_blank_values=True))))


async def read_parameters(
    request: HttpRequest, max_bytes: int, *, may_be_empty: bool = False
) -> Parameters:
    """Return the parameters of a request to register or change a model, in a JSON body or a query.

    If a JSON body ``may_be_empty`` and is empty, the query has them. Raises as `read_body`.
    """
    body = await read_body(request, max_bytes)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" or (may_be_empty and not body):
        return query_parameters(request)
    if len(body) > _MAX_JSON_BYTES:
        raise BadRequest(f"The JSON of a registration is longer than {_MAX_JSON_BYTES} bytes.")
    return Parameters(json_object(body), query_parameters(request).names)


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in a body, or raise BadRequest."""
    try:
        document = json.loads(body)
        json.dumps(document, ensure_ascii=False).encode()  # raises for a lone surrogate
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest("The body is not a JSON object.")
    return document
