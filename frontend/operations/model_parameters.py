"""Reads the parameters of requests to register, change or scale a model.

Text that looks like a number is a number, in a query and in JSON. In a registration, TorchServe's
own parameters count as absent if they are text instead of a number, or the number that its clients
send for "as configured". Changes of a served model are not in TorchServe's API and are strict.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from marserve.frontend.configuration.model_entry import RUNTIME
from marserve.frontend.configuration.model_schema import (
    LIVE,
    MAX_WORKERS,
    REGISTERED,
    SETTINGS,
    read_consistent,
)
from marserve.frontend.configuration.other_servers import FOREIGN_SETTINGS
from marserve.frontend.configuration.setting import Fields, Setting, snake_case
from marserve.frontend.configuration.setting_kinds import AUTOMATIC
from marserve.frontend.configuration.unread_keys import (
    NOT_A_PARAMETER,
    foreign_name_hint,
    unread_parameter,
)
from marserve.frontend.errors import BadRequest
from marserve.frontend.operations.parameters import Parameters
from marserve.frontend.registration.model_changes import Registration
from marserve.frontend.settings.layers import attributes_of
from marserve.frontend.settings.model_settings import ModelSettings

_OF_REGISTRATIONS = (
    "url",
    "model_name",
    "handler",
    "runtime",
    "synchronous",
    "s3_sse_kms",
    "initial_workers",
)
# Names of settings that requests no longer set, in a list or separated by commas.
_UNSET = "unset"
# The last two are TorchServe's, where they have no effect either.
_OF_CHANGES = (
    "min_worker",
    "max_worker",
    "synchronous",
    "model_version",
    _UNSET,
    "number_gpu",
    "timeout",
)
_MAX_TOLD = 20
_MAX_NAME = 40
_ONLY_REGISTERED = {
    *_OF_REGISTRATIONS,
    *(name for row in REGISTERED if not row.is_live for name in row.parameters),
}


def read_registration(parameters: Parameters) -> Registration:
    """Return the registration that a request describes, or raise BadRequest."""
    if not parameters.has("url"):
        raise BadRequest("Parameter url is required.")
    runtime = parameters.text("runtime")
    if runtime and not RUNTIME.accepts(runtime):
        raise BadRequest(f"Invalid RuntimeType value: {runtime}")
    initial_workers = parameters.at_least("initial_workers", 0)
    _check_workers(initial_workers or 0)
    return Registration(
        url=parameters.text("url"),
        name=parameters.text("model_name"),
        handler=parameters.text("handler"),
        runtime=runtime,
        synchronous=parameters.flag("synchronous", default=True),
        s3_sse_kms=parameters.flag("s3_sse_kms", default=False),
        initial_workers=initial_workers,
        settings=registered_settings(parameters),
    )


def read_worker_limits(parameters: Parameters, *, strict: bool) -> tuple[int, int]:
    """Return the minimum and maximum number of workers that a request sets, or raise BadRequest.

    In ``strict`` requests text instead of a number is refused; else it counts as absent.
    """

    def count(name: str, default: int) -> int:
        number = parameters.number(name)
        if number is None:
            return -1 if strict and parameters.has(name) else default
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
        raise BadRequest(f"{count} workers are too many; the maximum is {MAX_WORKERS}.")


def registered_settings(parameters: Parameters) -> Fields:
    """Return the settings of a registration; BadRequest names parameter, value and rule."""
    return _read(REGISTERED, parameters, is_registration=True)


def changed_settings(parameters: Parameters) -> Fields:
    """Return the settings of a change; BadRequest names parameter, value and rule.

    None is the value of settings that requests no longer set.
    """
    return {**dict.fromkeys(attributes_of(_unset_rows(parameters))), **_read(LIVE, parameters)}


def _unset_rows(parameters: Parameters) -> list[Setting]:
    value = parameters.value(_UNSET)
    names = value.split(",") if isinstance(value, str) else value
    if names is None:
        return []
    rows = {name: row for row in LIVE for name in _names(row)}
    names = [str(name).strip() for name in names] if isinstance(names, list) else [""]
    if unknown := [name for name in names if name not in rows]:
        known = ", ".join(row.parameter for row in LIVE)
        raise BadRequest(f"{_UNSET}: {unknown[0][:_MAX_NAME]!r} is not one of {known}.")
    return [rows[name] for name in names]


def changes_batching(parameters: Parameters) -> bool:
    """Return whether a change has a parameter of batching, even one without a value."""
    names = {_UNSET, *(name for row in LIVE for name in _names(row))}
    return not names.isdisjoint(parameters.names)


def refuse_unintended_scaling(parameters: Parameters, unread: Sequence[str]) -> None:
    """Raise BadRequest for a change without workers and settings that has unread parameters.

    As a change without parameters, it would scale the model to one worker, as in TorchServe. Beside
    a known parameter, only a parameter with a known meaning elsewhere is refused, such as a
    misspelt one. ``unread`` are the sentences of `unread_parameters`.
    """
    if not parameters.names.isdisjoint(_OF_CHANGES):
        unread = [sentence for sentence in unread if not sentence.endswith(f"{NOT_A_PARAMETER}.")]
    if unread:
        raise BadRequest(" ".join(unread))


def unread_parameters(parameters: Parameters, *, is_registration: bool) -> Sequence[str]:
    """Return a sentence for each parameter of a registration, or of a change, that is not read."""
    rows, others = (REGISTERED, _OF_REGISTRATIONS) if is_registration else (LIVE, _OF_CHANGES)
    known = [*others, *(name for row in rows for name in row.parameters)]
    read = {*known, *(name for row in rows for name in _names(row))}

    def sentence_of(name: str) -> str:
        if not is_registration and snake_case(name) in _ONLY_REGISTERED:
            return f"{snake_case(name)} counts when a model is registered, and not later."
        return unread_parameter(name, known)

    return unread_sentences(parameters, read, sentence_of)


def unread_sentences(
    parameters: Parameters, read: AbstractSet[str], sentence_of: Callable[[str], str]
) -> Sequence[str]:
    """Return sentences about parameters that are not read: of the query, and unknown ones."""
    in_query = [
        f"{name[:_MAX_NAME]!r} in the query does not count beside a body of JSON."
        for name in parameters.passed_over[:_MAX_TOLD]
    ]
    return in_query + [sentence_of(each) for each in sorted(parameters.names - read)[:_MAX_TOLD]]


def _names(row: Setting) -> Sequence[str]:
    """The names in requests; foreign settings also have their JSON names."""
    return row.spellings if row in FOREIGN_SETTINGS else row.parameters


def format_settings(settings: ModelSettings) -> str:
    """Return the settings of a model that can be changed, as text."""
    current = settings.values
    values = {row.parameter: row.write(current) for row in SETTINGS if row.is_live}
    if settings.batching.is_automatic:
        values["batch_size"] = AUTOMATIC
    if settings.batching.goal_bounds_queue:
        values["job_queue_size"] = None
    texts = {name: _as_text(value) for name, value in values.items() if value is not None}
    return ", ".join(f"{name}={text}" for name, text in texts.items() if text)


def _as_text(value: Any) -> str:
    """Return a value as in a query; empty for an empty list, and for False."""
    if isinstance(value, bool):
        return "true" if value else ""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _read(
    rows: Sequence[Setting], parameters: Parameters, *, is_registration: bool = False
) -> Fields:
    for name in parameters.names:
        if other := foreign_name_hint(name):
            raise BadRequest(f"{name[:40]} is not a parameter of this server; {other}")
    values: dict[str, Any] = {}
    for row in rows:
        for name in _names(row):
            value = parameters.value(name)
            values[name] = row.kind.parse(value.strip()) if isinstance(value, str) else value
        if is_registration and row.as_configured and not row.kind.accepts(values[row.parameter]):
            values[row.parameter] = parameters.number(row.parameter, row.as_configured)
    try:
        return read_consistent(rows, values, names=_names)
    except ValueError as error:
        raise BadRequest(str(error)) from error
