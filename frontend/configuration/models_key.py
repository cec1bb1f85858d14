"""The ``models`` key of config.properties: JSON, name -> version -> settings of that model."""

import json
from collections.abc import Iterable, Iterator, Mapping

from marserve.backend.manifest import RUNTIMES
from marserve.frontend.configuration.model_schema import BY_KEY, BY_SPELLING, MAX_WORKERS
from marserve.frontend.configuration.setting_kinds import (
    AUTOMATIC,
    MAX_NUMBER,
    is_whole,
    plain_number,
    short_repr,
)
from marserve.frontend.configuration.unread_keys import advice_for_model
from marserve.frontend.configuration.values import parsed

#: By name, version and member, as in the JSON; without members that are ignored.
ModelEntries = Mapping[str, Mapping[str, Mapping[str, object]]]

#: TorchServe's members, here and in snapshots: numbers.
TORCHSERVES = (
    "minWorkers",
    "maxWorkers",
    "batchSize",
    "maxBatchDelay",
    "responseTimeout",
    "startupTimeout",
)
#: Ours: all other settings that an entry may have.
OURS = frozenset(
    name for name, row in BY_SPELLING.items() if "models" in row.sources and name not in TORCHSERVES
)
_USUAL = [key for key, row in BY_KEY.items() if "models" in row.sources]
BYSTANDERS = ("defaultVersion", "marName")  # of snapshots; TorchServe never read them here
RUNTIME = "runtimeType"  # it replaces the manifest's
_EXPECTED = 'JSON like {"name": {"version": {"batchSize": 4}}}'


class MemberRefused(ValueError):
    """One of our members is wrong: it stops the start, which broken JSON does not."""


def model_entries(text: str) -> ModelEntries:
    """Return the settings by name and version; of TorchServe's, only numbers above 0 count.

    Raises:
        ValueError: It is not such JSON, or a `MemberRefused`.
    """
    entries: dict[str, dict[str, dict[str, object]]] = {}
    for name, version, key, value in _members(text):
        if key in OURS and value is not None and not BY_SPELLING[key].kind.accepts(value):
            rule = BY_SPELLING[key].kind.rule
            raise MemberRefused(
                f"{key} of {name} {version} to be {rule}, it is {short_repr(value)}"
            )
        of_version = entries.setdefault(name, {}).setdefault(version, {})
        if _is_read(key, value):
            of_version[key] = value
    return entries


def unread_model_settings(text: str) -> Iterator[str]:
    """Yield a sentence for each member that `model_entries` ignores; none without such JSON."""
    try:
        members = [*_members(text)]
    except ValueError:
        return
    for name, version, key, value in members:
        if not _is_read(key, value) and key not in BYSTANDERS:
            ignored = f"models: {key}={json.dumps(value)} of {name} {version} is ignored"
            is_known = key in OURS or key in TORCHSERVES
            yield f"{ignored}." if is_known else f"{ignored}{advice_for_model(key, _USUAL)}"


def _members(text: str) -> Iterator[tuple[str, str, str, object]]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_EXPECTED} ({error})") from error
    for name, versions in _items(parsed):
        for version, settings in _items(versions):
            for key, value in _items(settings):
                yield name, version, key, plain_number(value)


def _items(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, dict):
        return value.items()
    raise ValueError(_EXPECTED)


def _is_read(key: str, value: object) -> bool:
    if key == RUNTIME:
        return value in RUNTIMES
    if key in OURS or (key == "batchSize" and value == AUTOMATIC):
        return value is not None
    maximum = MAX_WORKERS if key == "minWorkers" else MAX_NUMBER
    return key in TORCHSERVES and is_whole(value, 1, maximum)


MODEL_ENTRIES = parsed(_EXPECTED, model_entries)
