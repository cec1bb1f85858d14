"""Which models were served, and by how many workers: the ``model_snapshot`` of a snapshot file.

JSON in TorchServe's members and order, so that either server restores what the other has written.
Numbers and switches may be texts, as KServe's model-archiver writes them and TorchServe read them.
Some members are ours, and there only where they say something that TorchServe's do not:

    handler          of a model that was registered with another handler than its archive names
    batchSizeAuto    that ``batchSize`` was found by measuring
    batchPolicy, …   what else somebody has set, as in model-config.yaml
    batchCosts       what batches cost, as learnt: rows of size, milliseconds, batches seen

    {"name": "20261120213709459-startup.cfg", "modelCount": 1, "created": 1795210629459,
     "models": {NAME: {VERSION: {"defaultVersion": true, "marName": "probe.mar", ...}}}}
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from marserve.frontend.configuration.model_schema import MAX_WORKERS, SETTINGS
from marserve.frontend.configuration.models_key import TORCHSERVES
from marserve.frontend.configuration.setting import Setting
from marserve.frontend.configuration.setting_kinds import MAX_NUMBER
from marserve.frontend.configuration.values import plain_number

_RUNTIME = "python"
_TIMEOUT = 120
_MAX_COSTS = 100
#: What a request may have said, and no archive remembers; less TorchServe's members.
SAVED = tuple(row for row in SETTINGS if "request" in row.sources and row.key not in TORCHSERVES)


@dataclass(frozen=True)
class SavedModel:
    """One model version as it was served; times in seconds.

    Attributes:
        archive: What to register: a name in the model store, or an absolute directory.
        is_default: Whether it answers where no version is named.
        handler: Where the registration had chosen another than the archive names; else empty.
        is_automatic: Whether ``batch_size`` was found by measuring.
        settings: What else somebody had set, in members of the snapshot: those of `SAVED`.
        batch_costs: Rows of size, seconds and batches seen; empty where nobody asks for them.
    """

    name: str
    version: str
    is_default: bool
    archive: str
    min_workers: int
    max_workers: int
    batch_size: int
    max_batch_delay: float
    response_timeout: float
    startup_timeout: float
    runtime: str = _RUNTIME
    parallel_level: int = 0
    handler: str = ""
    is_automatic: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch_costs: tuple[tuple[float, float, int], ...] = ()


def saved_models(text: str) -> tuple[SavedModel, ...]:
    """Reads a ``model_snapshot``; empty where its ``modelCount`` is 0 or less.

    Raises:
        ValueError: It is none; the text completes "expected ...".
    """
    try:
        snapshot = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the JSON that a snapshot holds ({error})") from error
    models = _object(snapshot, "the snapshot").get("models", {})
    count = plain_number(snapshot.get("modelCount", 1))
    if type(count) is not int:
        raise ValueError("modelCount to be a whole number")
    return tuple(_read_models(models)) if count > 0 else ()


def snapshot_json(name: str, created_ms: int, models: Iterable[SavedModel]) -> str:
    """Writes a ``model_snapshot``.

    Args:
        name: Of the file it goes into.
        created_ms: Milliseconds since the epoch.
        models: In the order in which they are to be registered again.
    """
    by_name: dict[str, dict[str, Any]] = {}
    for model in models:
        by_name.setdefault(model.name, {})[model.version] = _written(model)
    count = sum(map(len, by_name.values()))
    snapshot = {"name": name, "modelCount": count, "created": created_ms, "models": by_name}
    return json.dumps(snapshot, indent=2)


def _written(model: SavedModel) -> dict[str, Any]:
    members = {
        "defaultVersion": model.is_default,
        "marName": model.archive,
        "minWorkers": model.min_workers,
        "maxWorkers": model.max_workers,
        "batchSize": model.batch_size,
        "maxBatchDelay": _plain(model.max_batch_delay * 1000),
        "responseTimeout": _plain(model.response_timeout),
        "startupTimeout": _plain(model.startup_timeout),
        "runtimeType": model.runtime,
    }
    if model.parallel_level > 0:
        members["parallelLevel"] = model.parallel_level
    if model.handler:
        members["handler"] = model.handler
    if model.is_automatic:
        members["batchSizeAuto"] = True
    members |= model.settings
    if model.batch_costs:
        members["batchCosts"] = [
            [_plain(size), _plain(seconds * 1000), batches]
            for size, seconds, batches in model.batch_costs
        ]
    return members


def _plain(number: float) -> float:
    """Whole where it can be, as TorchServe knows no other numbers."""
    rounded = round(float(number), 6)
    return int(rounded) if rounded.is_integer() else rounded


def _read_models(models: object) -> Iterator[SavedModel]:
    for name, versions in _object(models, "models").items():
        for version, members in _object(versions, f"models: {name}").items():
            yield _read(name, version, _object(members, f"models: {name} {version}"))


def _read(name: str, version: str, members: Mapping[str, object]) -> SavedModel:
    reader = _Members(members, f"{name} {version}")
    low = reader.whole("minWorkers", minimum=0, maximum=MAX_WORKERS)
    return SavedModel(
        name=name,
        version=version,
        is_default=reader.flag("defaultVersion"),
        archive=reader.text("marName"),
        min_workers=low,
        max_workers=reader.whole("maxWorkers", minimum=low),
        batch_size=reader.whole("batchSize", minimum=1),
        # TorchServe could save the -10000 by which it meant "never wait".
        max_batch_delay=max(0.0, reader.number("maxBatchDelay", above=-MAX_NUMBER)) / 1000,
        response_timeout=reader.number("responseTimeout", above=0, default=_TIMEOUT),
        startup_timeout=reader.number("startupTimeout", above=0, default=_TIMEOUT),
        runtime=reader.text("runtimeType", _RUNTIME),
        parallel_level=reader.whole("parallelLevel", minimum=0, default=0),
        handler=reader.text("handler", ""),
        is_automatic=reader.flag("batchSizeAuto"),
        settings={row.key: members[row.key] for row in SAVED if reader.holds(row)},
        batch_costs=reader.costs(),
    )


class _Members:
    """The members of one version; what is missing or wrong is told with the name of the model."""

    def __init__(self, members: Mapping[str, object], model: str) -> None:
        self._members = members
        self._model = model

    def whole(
        self, key: str, *, minimum: int, maximum: int = MAX_NUMBER, default: int | None = None
    ) -> int:
        value = plain_number(self._members.get(key, default))
        if type(value) is int and minimum <= value <= maximum:
            return value
        raise self._wrong(key, f"a whole number from {minimum} to {maximum}")

    def number(self, key: str, *, above: float, default: float | None = None) -> float:
        value = plain_number(self._members.get(key, default))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and above < (number := float(str(value))) <= MAX_NUMBER:
            return number
        raise self._wrong(key, f"a number above {above}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._members.get(key, default)
        if isinstance(value, str) and (value or default == ""):
            return value
        raise self._wrong(key, "a text")

    def flag(self, key: str) -> bool:
        value = self._members.get(key, False)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if isinstance(value, bool):
            return value
        raise self._wrong(key, "true or false")

    def holds(self, row: Setting) -> bool:
        """Whether it is there, and right."""
        value = self._members.get(row.key)
        if value is not None and not row.kind.accepts(value):
            raise self._wrong(row.key, row.kind.rule)
        return value is not None

    def costs(self) -> tuple[tuple[float, float, int], ...]:
        rows = self._members.get("batchCosts", [])
        if isinstance(rows, list) and len(rows) <= _MAX_COSTS and all(map(_is_cost, rows)):
            return tuple((float(size), ms / 1000, count) for size, ms, count in rows)
        raise self._wrong("batchCosts", "rows of size, milliseconds and a number of batches")

    def _wrong(self, key: str, allowed: str) -> ValueError:
        value = repr(self._members.get(key, "missing"))[:80]
        return ValueError(f"{key} of {self._model} to be {allowed}, it is {value}")


def _is_cost(row: object) -> bool:
    if not isinstance(row, list) or [type(number) in (int, float) for number in row] != [True] * 3:
        return False
    size, milliseconds, batches = row
    return (
        1 <= size <= MAX_NUMBER
        and 0 < milliseconds <= MAX_NUMBER
        and type(batches) is int
        and batches > 0
    )


def _object(value: object, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{what} to be a JSON object")
