"""Reads the parameters of a registration, and writes the settings of models for OpenAPI."""

import json

from marserve.frontend.configuration.model_schema import BATCHING, LIVE, REGISTERED
from marserve.frontend.configuration.other_servers import FOREIGN_SETTINGS
from marserve.frontend.configuration.saved_models import SAVED
from marserve.frontend.configuration.setting import Setting
from marserve.frontend.configuration.setting_kinds import Json, whole
from marserve.frontend.errors import BadRequest
from marserve.frontend.http.request_bodies import read_body
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.operations.parameters import Parameters
from marserve.frontend.rest.parameters import query_parameters

# Its content is written to logs, descriptions and snapshots.
_MAX_JSON_BYTES = 1 << 16
# By their names in the files of openapi/.
_GROUPS = {
    "batching": tuple(row for row in REGISTERED if row in (*BATCHING, *FOREIGN_SETTINGS)),
    "others": tuple(row for row in REGISTERED if row not in (*BATCHING, *FOREIGN_SETTINGS)),
    "live": LIVE,
}


async def read_parameters(
    request: HttpRequest, max_bytes: int, *, may_be_empty: bool = False
) -> Parameters:
    """Return the parameters of a request to register or change a model, in a JSON body or a query.

    If a JSON body ``may_be_empty`` and is empty, the query has the parameters.

    Raises:
        BadRequest: The body is not a JSON object, or too long.
        PayloadTooLarge: The body is longer than ``max_bytes``.
    """
    body = await read_body(request, max_bytes)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" or (may_be_empty and not body):
        return query_parameters(request)
    if len(body) > _MAX_JSON_BYTES:
        raise BadRequest(f"The JSON of a registration is longer than {_MAX_JSON_BYTES} bytes.")
    try:
        document = json.loads(body)
        json.dumps(document, ensure_ascii=False).encode()  # raises for a lone surrogate
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest("The body is not a JSON object.")
    return Parameters(document, query_parameters(request).names)


def setting_parameters(group: str) -> list[Json]:
    """Return settings as parameters of OpenAPI: "batching", "others" (registration) or "live"."""
    rows, is_registration = _GROUPS[group], group != "live"
    parameters = [_parameter(row, is_registration=is_registration) for row in rows]
    for row in rows:
        for name in row.parameters[1:]:
            same = f"The same as `{row.parameter}`."
            parameters.append({**_parameter(row), "name": name, "description": same})
    return [{**each, "required": False} for each in parameters] if is_registration else parameters


def described_schemas() -> dict[str, Json]:
    """Return the schemas of our own settings in the descriptions of models."""
    return {row.key: {"description": row.help, **row.kind.schema} for row in SAVED}


def _parameter(row: Setting, *, is_registration: bool = False) -> Json:
    text, schema = row.help, row.kind.query_schema or row.kind.schema
    if is_registration and row.as_configured:
        # Numbers below the smallest useful value mean "as configured" in TorchServe.
        numbers = ", ".join(map(str, row.as_configured))
        text = f"{text.removesuffix('.')}; {numbers}: as configured."
        lowest = row.as_configured[-1]
        schema = {**whole(lowest).schema, "default": lowest}
    return {"name": row.parameter, "in": "query", "description": text, "schema": schema}
