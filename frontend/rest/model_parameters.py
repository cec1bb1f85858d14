"""What requests to register, change or scale a model ask for; and settings as OpenAPI has them.

Text that looks like a number is one, in a query and in JSON; `configuration.model_schema` has what
it may be. Of TorchServe's own parameters a registration takes a text that is no number, or the
number that its clients send for "as configured", as not given. A change of a served model was never
TorchServe's, and is taken at its word.
"""

import json
from collections.abc import Sequence
from typing import Any

from marserve.frontend.configuration.model_schema import BATCHING, LIVE, MAX_WORKERS, SETTINGS
from marserve.frontend.configuration.saved_models import SAVED
from marserve.frontend.configuration.setting import Fields, Setting, read_settings
from marserve.frontend.configuration.setting_kinds import AUTOMATIC, Json, whole
from marserve.frontend.errors import BadRequest
from marserve.frontend.http.parameters import Parameters, query_parameters
from marserve.frontend.http.request_bodies import read_body
from marserve.frontend.http.router import HttpRequest
from marserve.frontend.models.resolver import Registration
from marserve.frontend.models.settings.model_settings import ModelSettings

_RUNTIMES = ("python", "python3", "LSP")
_REGISTERED = tuple(row for row in SETTINGS if "request" in row.sources)
# What it holds goes into logs, descriptions and snapshots.
_MAX_JSON_BYTES = 1 << 16
# By what the files of openapi/ call them.
_GROUPS = {
    "batching": tuple(row for row in _REGISTERED if row in BATCHING),
    "others": tuple(row for row in _REGISTERED if row not in BATCHING),
    "live": LIVE,
}


async def read_registration(request: HttpRequest, max_bytes: int) -> Registration:
    """What a request to register a model asks for, by a JSON body or else a query.

    Raises:
        BadRequest: A parameter is missing or cannot be used.
        PayloadTooLarge: The body is longer than ``max_bytes``.
    """
    parameters = await _parameters(request, max_bytes)
    if not parameters.has("url"):
        raise BadRequest("Parameter url is required.")
    runtime = parameters.text("runtime")
    if runtime and runtime not in _RUNTIMES:
        raise BadRequest(f"Invalid RuntimeType value: {runtime}")
    initial_workers = parameters.at_least("initial_workers", 0)
    _check_workers(initial_workers or 0)
    return Registration(
        url=parameters.text("url"),
        model_name=parameters.text("model_name"),
        handler=parameters.text("handler"),
        runtime=runtime,
        synchronous=parameters.flag("synchronous", default=True),
        s3_sse_kms=parameters.flag("s3_sse_kms", default=False),
        initial_workers=initial_workers,
        settings=registered_settings(parameters),
    )


async def _parameters(request: HttpRequest, max_bytes: int) -> Parameters:
    content_type = request.headers.get("content-type", "")
    body = await read_body(request, max_bytes)
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return query_parameters(request)
    if len(body) > _MAX_JSON_BYTES:
        raise BadRequest(f"The JSON of a registration is longer than {_MAX_JSON_BYTES} bytes.")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest("The body is not a JSON object.")
    return Parameters(document)


def read_worker_limits(query: Parameters, *, strict: bool) -> tuple[int, int]:
    """How many workers a model shall have, at least and at most; BadRequest where it cannot.

    Args:
        query: Of the request.
        strict: Whether a number that is none is refused, rather than left out.
    """

    def count(name: str, default: int) -> int:
        number = query.number(name)
        if number is None:
            return -1 if strict and query.has(name) else default
        return number

    low = count("min_worker", 1)
    high = count("max_worker", low)
    if low < 0:
        raise BadRequest("min_worker cannot be less than 0.")
    _check_workers(low)
    if high < low:
        raise BadRequest("max_worker cannot be less than min_worker.")
    return low, high


def _check_workers(count: int) -> None:
    if count > MAX_WORKERS:
        raise BadRequest(f"No model can have {count} workers; the most are {MAX_WORKERS}.")


def registered_settings(parameters: Parameters) -> Fields:
    """The settings in a registration; a BadRequest names parameter, value and rule."""
    return _read(_REGISTERED, parameters, is_registration=True)


def changed_settings(parameters: Parameters) -> Fields:
    """The settings in a change of a served model; a BadRequest names parameter, value and rule."""
    return _read(LIVE, parameters)


def format_settings(settings: ModelSettings) -> str:
    """What can be changed of a model, as parameters for people to read."""
    current = settings.values
    values = {row.parameter: row.write(current) for row in LIVE}
    if settings.batching.is_automatic:
        values["batch_size"] = AUTOMATIC
    texts = {
        name: ",".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in values.items()
        if value is not None
    }
    return ", ".join(f"{name}={text}" for name, text in texts.items() if text)


def setting_parameters(group: str) -> list[Json]:
    """Settings as OpenAPI's parameters: "batching" and "others" of a registration, or "live"."""
    rows, is_registration = _GROUPS[group], group != "live"
    parameters = [_parameter(row, is_registration=is_registration) for row in rows]
    for row in rows:
        for name in row.parameters[1:]:
            same = f"The same as `{row.parameter}`."
            parameters.append({**_parameter(row), "name": name, "description": same})
    return [{**each, "required": False} for each in parameters] if is_registration else parameters


def described_schemas() -> dict[str, Json]:
    """The schemas of the settings of our own that descriptions of models have."""
    return {row.key: {"description": row.help, **row.kind.schema} for row in SAVED}


def _parameter(row: Setting, *, is_registration: bool = False) -> Json:
    text, schema = row.help, row.kind.query_schema or row.kind.schema
    if is_registration and row.as_configured:
        # Numbers below the smallest useful value are TorchServe's marks for "as configured".
        numbers = ", ".join(map(str, row.as_configured))
        text = f"{text.removesuffix('.')}; {numbers}: as configured."
        lowest = row.as_configured[-1]
        schema = {**whole(lowest).schema, "default": lowest}
    return {"name": row.parameter, "in": "query", "description": text, "schema": schema}


def _read(
    rows: Sequence[Setting], parameters: Parameters, *, is_registration: bool = False
) -> Fields:
    values: dict[str, Any] = {}
    for row in rows:
        for name in row.parameters:
            value = parameters.value(name)
            values[name] = row.kind.parse(value.strip()) if isinstance(value, str) else value
        if is_registration and row.as_configured and not row.kind.accepts(values[row.parameter]):
            values[row.parameter] = parameters.number(row.parameter, row.as_configured)
    try:
        return read_settings(rows, values, names=lambda row: row.parameters)
    except ValueError as error:
        raise BadRequest(str(error)) from error
