"""The ``models`` key of config.properties: JSON, name -> version -> settings of that model."""

import json
from collections.abc import Iterable, Iterator, Mapping

from marserve.frontend.configuration.model_entry import RUNTIME, TORCHSERVES
from marserve.frontend.configuration.model_schema import BY_KEY, BY_SPELLING, MAX_WORKERS
from marserve.frontend.configuration.setting_kinds import (
    automatic_or,
    plain_number,
    short_repr,
    whole,
)
from marserve.frontend.configuration.unread_keys import advice_for_model
from marserve.frontend.configuration.values import parsed

#: By name, version and member, as in the JSON; without members that are ignored.
ModelMembers = Mapping[str, Mapping[str, Mapping[str, object]]]

#: The kinds of the members that are read. Of TorchServe's, only numbers above 0 count.
KINDS = {
    **{name: row.kind for name, row in BY_SPELLING.items() if "models" in row.sources},
    **dict.fromkeys(TORCHSERVES, whole(1)),
    "minWorkers": whole(1, MAX_WORKERS),
    "batchSize": automatic_or(whole(1)),
    "runtimeType": RUNTIME,
}
_IGNORED_IF_WRONG = (*TORCHSERVES, "runtimeType")
_USUAL = [key for key, row in BY_KEY.items() if "models" in row.sources]
BYSTANDERS = ("defaultVersion", "marName")  # of snapshots; TorchServe never read them here
_EXPECTED = 'JSON like {"name": {"version": {"batchSize": 4}}}'


class MemberRefused(ValueError):
    """One of our members is wrong: it stops the start, which broken JSON does not."""


def model_entries(text: str) -> ModelMembers:
    """Return the settings by name and version; of TorchServe's, only numbers above 0 count.

    Raises:
        ValueError: It is not such JSON, or a `MemberRefused`.
    """
    entries: dict[str, dict[str, dict[str, object]]] = {}
    for name, version, key, value in _members(text):
        of_version = entries.setdefault(name, {}).setdefault(version, {})
        if _is_read(key, value):
            of_version[key] = value
        elif key in KINDS and key not in _IGNORED_IF_WRONG and value is not None:
            what = f"{key} of {name} {version} to be {KINDS[key].rule}"
            raise MemberRefused(f"{what}, it is {short_repr(value)}")
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
            yield f"{ignored}." if key in KINDS else f"{ignored}{advice_for_model(key, _USUAL)}"


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
    return value is not None and key in KINDS and KINDS[key].accepts(value)


MODELS = parsed(_EXPECTED, model_entries)
