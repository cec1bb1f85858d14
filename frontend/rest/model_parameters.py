"""The settings of a model as the parameters of a request, and as OpenAPI describes them.

In a query everything is text, and in JSON clients send numbers as text, too. A text that looks like
a number is one, then; `configuration.model_schema` has what it may be.

A registration has to bear what TorchServe's clients send: of TorchServe's own parameters a text
that is no number, or the number that is their default, counts as not given. A change of a served
model was never TorchServe's, and is taken at its word.
"""

from collections.abc import Sequence
from typing import Any

from marserve.frontend.configuration.model_schema import BATCHING, LIVE, SETTINGS
from marserve.frontend.configuration.models_key import TORCHSERVES
from marserve.frontend.configuration.setting import Fields, Setting, read_settings
from marserve.frontend.configuration.setting_kinds import AUTOMATIC, Json, whole
from marserve.frontend.errors import BadRequest
from marserve.frontend.http.parameters import Parameters
from marserve.frontend.models.settings.model_settings import ModelSettings

_REGISTERED = tuple(row for row in SETTINGS if "request" in row.sources)
# By what the files of openapi/ call them.
_GROUPS = {
    "batching": tuple(row for row in _REGISTERED if row in BATCHING),
    "others": tuple(row for row in _REGISTERED if row not in BATCHING),
    "live": LIVE,
}


def registered_settings(parameters: Parameters) -> Fields:
    """The settings in a registration.

    Raises:
        BadRequest: Something is wrong; names parameter, value and rule.
    """
    return _read(_REGISTERED, parameters, is_registration=True)


def changed_settings(parameters: Parameters) -> Fields:
    """The settings in a change of a served model; often empty.

    Raises:
        BadRequest: Something is wrong; names parameter, value and rule.
    """
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
    """Settings as OpenAPI's parameters.

    Args:
        group: "batching" or "others", in a registration; "live", in a change.
    """
    rows = _GROUPS[group]
    parameters = [_parameter(row, is_registration=group != "live") for row in rows]
    for row in rows:
        for name in row.parameters[1:]:
            same = f"The same as `{row.parameter}`."
            parameters.append({**_parameter(row), "name": name, "description": same})
    return [{**each, "required": False} for each in parameters] if group != "live" else parameters


def described_schemas() -> dict[str, Json]:
    """The schemas of the settings of our own that descriptions of models have."""
    return {
        row.key: {"description": row.help, **row.kind.schema}
        for row in _REGISTERED
        if row.key not in TORCHSERVES
    }


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
        values |= {name: _typed(row, parameters.value(name)) for name in row.parameters}
        if is_registration and row.as_configured and not row.kind.accepts(values[row.parameter]):
            values[row.parameter] = parameters.number(row.parameter, row.as_configured)
    try:
        return read_settings(rows, values, names=lambda row: row.parameters)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _typed(row: Setting, value: Any) -> Any:
    return row.kind.parse(value.strip()) if isinstance(value, str) else value
