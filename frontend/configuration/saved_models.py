"""The ``model_snapshot`` of a snapshot file: the served models and their numbers of workers.

JSON with TorchServe's members in its order, so that either server restores the other's snapshots.
Numbers and switches may be texts, as KServe's model-archiver writes them and TorchServe reads them.
Some members are ours, and left out where TorchServe's are enough:

    handler          the handler of the registration, if it is not the one of the archive
    batchSizeAuto    whether ``batchSize`` was measured
    batchPolicy, …   other settings that were chosen, as in model-config.yaml
    setByRequests    the settings that requests or a catalog have set, even to a default
    batchCosts       the learnt costs of batches: rows of size, milliseconds, number of batches

    {"name": "20261120213709459-startup.cfg", "modelCount": 1, "created": 1795210629459,
     "models": {NAME: {VERSION: {"defaultVersion": true, "marName": "probe.mar", ...}}}}
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from marserve.frontend.configuration.model_entry import TORCHSERVES, ModelEntry, member, read_entry
from marserve.frontend.configuration.model_schema import BY_KEY, MAX_WORKERS, SETTINGS
from marserve.frontend.configuration.setting import Setting
from marserve.frontend.configuration.setting_kinds import (
    FLAG,
    MAX_NUMBER,
    TEXT,
    Kind,
    plain_number,
    whole,
)
from marserve.frontend.configuration.values import parsed

_MAX_COSTS = 100
#: The settings that requests can set, and the archive therefore lacks, except TorchServe's.
SAVED = tuple(row for row in SETTINGS if "request" in row.sources and row.key not in TORCHSERVES)


def saved_models(text: str) -> tuple[ModelEntry, ...]:
    """Return the models of a ``model_snapshot``; none if its ``modelCount`` is 0 or less.

    Raises:
        ValueError: The text is no snapshot; the message completes "expected ...".
    """
    try:
        snapshot = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{SAVED_MODELS.rule} ({error})") from error
    models = _object(snapshot, "the snapshot").get("models", {})
    count = plain_number(snapshot.get("modelCount", 1))
    if type(count) is not int:
        raise ValueError("modelCount to be a whole number")
    return tuple(_read_models(models)) if count > 0 else ()


def snapshot_json(name: str, created_ms: int, models: Iterable[ModelEntry]) -> str:
    """Return the ``model_snapshot`` of the file ``name``, in the order of registration."""
    by_name: dict[str, dict[str, Any]] = {}
    for model in models:
        by_name.setdefault(model.name, {})[model.version] = _members(model)
    count = sum(map(len, by_name.values()))
    snapshot = {"name": name, "modelCount": count, "created": created_ms, "models": by_name}
    return json.dumps(snapshot, indent=2)


def _members(model: ModelEntry) -> dict[str, Any]:
    values = {**vars(model), **model.values}
    written = [row for row in _OPTIONAL if values.get(row.attribute)]
    chosen = [row for row in SAVED if row.attribute in values]
    return {row.key: row.write(values) for row in (*_ALWAYS, *written, *chosen)}


def _read_models(models: object) -> Iterator[ModelEntry]:
    for name, versions in _object(models, "models").items():
        for version, members in _object(versions, f"models: {name}").items():
            yield _read(name, version, _object(members, f"models: {name} {version}"))


def _read(name: str, version: str, members: Mapping[str, Any]) -> ModelEntry:
    def refuse(row: Setting, key: str, value: object) -> NoReturn:
        text = repr(value)[:80]
        raise ValueError(f"{key} of {name} {version} to be {row.kind.rule}, it is {text}")

    members = {**_DEFAULTS, **members}
    for row in _ALWAYS:
        if members.get(row.key) is None:
            refuse(row, row.key, "missing")
    rows = (*_ALWAYS, *_OPTIONAL, *SAVED)
    return read_entry(rows, members, refuse, lambda row: (row.key,), name=name, version=version)


def _object(value: object, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{what} to be a JSON object")


def _whole(minimum: int, maximum: int = MAX_NUMBER) -> Kind:
    kind = replace(whole(minimum, maximum), rule=f"a whole number from {minimum} to {maximum}")
    return replace(kind, accepts=lambda value: kind.accepts(plain_number(value)), read=plain_number)


def _number(above: int, read: Callable[[float], float], write: Callable[[float], float]) -> Kind:
    def accepts(value: object) -> bool:
        number = plain_number(value)
        return type(number) in (int, float) and above < float(str(number)) <= MAX_NUMBER

    rule = f"a number above {above}"
    return Kind(
        rule, accepts, read=lambda value: read(float(str(plain_number(value)))), write=write
    )


def _plain(number: float) -> float:
    # TorchServe accepts whole numbers only.
    rounded = round(float(number), 6)
    return int(rounded) if rounded.is_integer() else rounded


def _is_cost(row: object) -> bool:
    if not isinstance(row, list) or [type(number) in (int, float) for number in row] != [True] * 3:
        return False
    size, milliseconds, batches = row
    is_batch = 1 <= size <= MAX_NUMBER and 0 < milliseconds <= MAX_NUMBER
    return is_batch and type(batches) is int and batches > 0


_NAME = Kind("a text", lambda value: isinstance(value, str) and value != "")
_NAMES = Kind(
    "a list of texts",
    lambda names: isinstance(names, list) and all(map(_NAME.accepts, names)),
    read=tuple,
    write=list,
)
_FLAG = replace(
    FLAG,
    accepts=lambda value: FLAG.accepts(FLAG.parse(str(value))),
    read=lambda value: FLAG.parse(str(value)),
)
# TorchServe may have saved -10000, which means "do not wait".
_DELAY = _number(-MAX_NUMBER, lambda ms: max(0.0, ms) / 1000, lambda delay: _plain(delay * 1000))
_SECONDS = _number(0, float, _plain)
_COSTS = Kind(
    "rows of size, milliseconds and a number of batches",
    lambda rows: isinstance(rows, list) and len(rows) <= _MAX_COSTS and all(map(_is_cost, rows)),
    read=lambda rows: tuple((float(size), ms / 1000, count) for size, ms, count in rows),
    write=lambda rows: [[_plain(size), _plain(s * 1000), count] for size, s, count in rows],
)
# TorchServe's members, which are always written.
_ALWAYS = (
    member("defaultVersion", _FLAG, "is_default"),
    member("marName", _NAME, "url"),
    member("minWorkers", _whole(0, MAX_WORKERS), "min_workers"),
    member("maxWorkers", _whole(0), "max_workers"),
    replace(BY_KEY["batchSize"], kind=_whole(1)),
    member("maxBatchDelay", _DELAY, "delay"),
    member("responseTimeout", _SECONDS, "response_timeout"),
    member("startupTimeout", _SECONDS, "startup_timeout"),
    member("runtimeType", _NAME, "runtime"),
)
_DEFAULTS = {
    "defaultVersion": False,
    "responseTimeout": 120,
    "startupTimeout": 120,
    "runtimeType": "python",
}
# Others, which are written if they have a value.
_OPTIONAL = (
    member("parallelLevel", _whole(0), "parallel_level"),
    member("handler", TEXT),
    member("batchSizeAuto", _FLAG, "is_automatic"),
    member("setByRequests", _NAMES, "set_by_requests"),
    member("batchCosts", _COSTS, "batch_costs"),
)
#: The kind of a ``model_snapshot``.
SAVED_MODELS = parsed("the JSON that a snapshot holds", saved_models)
