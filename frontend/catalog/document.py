"""Read the text of a catalog: the wanted models with their versions and settings.

    {"models": {NAME: {VERSION: {"url": "digits.mar", "defaultVersion": true, "minWorkers": 2}}}}

The format is JSON because a part of a JSON file is not valid, while a part of a YAML file may be a
catalog with fewer models. The keys are those of ``models`` in config.properties and of snapshots. A
model with an unknown key or a wrong value is skipped as a whole, and its earlier entry stays; the
other models are applied. So a key that only newer servers know does not stop older ones.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from marserve.frontend.configuration.model_entry import RUNTIME, ModelEntry, member, read_entry
from marserve.frontend.configuration.model_schema import (
    BY_KEY,
    BY_SPELLING,
    MAX_WORKERS,
)
from marserve.frontend.configuration.setting import Setting, refuse_value
from marserve.frontend.configuration.setting_kinds import FLAG, Kind, whole
from marserve.frontend.configuration.unread_keys import advice_for_model
from marserve.frontend.logs.formats import excerpt

#: Of a document.
MAX_BYTES = 4 << 20
WORKERS = ("minWorkers", "maxWorkers")
_TEXT = Kind("a text", lambda text: isinstance(text, str) and text != "" and text.isprintable())
_OWN = (
    member("url", _TEXT),
    member("handler", _TEXT),
    member("runtimeType", RUNTIME, "runtime"),
    member("s3SseKms", FLAG, "s3_sse_kms"),
    member("defaultVersion", FLAG, "is_default"),
    member("minWorkers", whole(0, MAX_WORKERS), "min_workers"),
    member("maxWorkers", whole(0, MAX_WORKERS), "max_workers"),
)
#: The rows of all members, by all their names.
_ROWS: Mapping[str, Setting] = {
    **{name: row for name, row in BY_SPELLING.items() if "models" in row.sources},
    **{row.key: row for row in _OWN},
}
_USUAL = [*(row.key for row in _OWN), *(key for key in BY_KEY if key in _ROWS)]
#: The search for a similar name takes 0.2 ms; usually all models have the same unknown key.
_advice = lru_cache(maxsize=256)(partial(advice_for_model, known=_USUAL))


class WrongCatalog(ValueError):
    """A text that is not a catalog; the sentence is for the operator."""


@dataclass(frozen=True)
class CatalogModel:
    """The wanted versions of a model; if its text is wrong, none, or those wanted before."""

    default: str  # version that serves requests without a version
    versions: Mapping[str, ModelEntry]
    wrong: str = ""  # why its text cannot be applied; empty if it can


#: Models by name.
Catalog = Mapping[str, CatalogModel]


def read_catalog(text: bytes) -> Catalog:
    """Return the models of a document; raises WrongCatalog if it is not a catalog."""
    if len(text) > MAX_BYTES:
        raise WrongCatalog(f"it is longer than {MAX_BYTES} bytes.")
    try:
        document = json.loads(text, object_pairs_hook=_without_repetition)
    except WrongCatalog:
        raise
    except (ValueError, RecursionError) as error:
        raise WrongCatalog(f"it is not valid JSON: {error}") from error
    members = _object(document, "the document")
    if [*members] != ["models"]:
        raise WrongCatalog('it must be {"models": {...}}, with no other key beside "models".')
    models = _object(members["models"], "models")
    return {name: _model(name, text) for name, text in models.items()}


def _without_repetition(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise WrongCatalog(f"{name[:80]!r} appears twice in an object.")
        found[name] = value
    return found


def _model(name: str, text: object) -> CatalogModel:
    try:
        json.dumps([name, text], ensure_ascii=False).encode()
        return _read_model(name, text)
    except UnicodeEncodeError:
        reason = f"{name}: it contains a lone surrogate, which is not a character."
    except (WrongCatalog, RecursionError) as error:
        reason = str(error)
    return CatalogModel("", {}, wrong=excerpt(reason))


def _read_model(name: str, versions: object) -> CatalogModel:
    entries: dict[str, ModelEntry] = {}
    for version, value in _object(versions, name).items():
        which = f"{name} {version}"
        members = _object(value, which)
        try:
            entries[version] = _read_entry(members)
        except ValueError as error:
            raise WrongCatalog(f"{which}: {error}") from error
    if not name or not all(entries):
        raise WrongCatalog("a model has an empty name or version.")
    if not entries:
        raise WrongCatalog(f"{name} has no versions; leave it out to unregister it.")
    defaults = [version for version, entry in entries.items() if entry.is_default]
    defaults = defaults or ([*entries] if len(entries) == 1 else [])
    if len(defaults) != 1:
        raise WrongCatalog(
            f"{name} has {len(entries)} versions; exactly one needs defaultVersion: true."
        )
    return CatalogModel(defaults[0], entries)


def _read_entry(members: Mapping[str, Any]) -> ModelEntry:
    for key, value in members.items():
        if key not in _ROWS:
            raise ValueError(f"{key[:80]!r} is unknown{_advice(key)}")
        if value is None:
            raise ValueError(f"{key}: null is not a value; leave it out.")
    if "url" not in members:
        raise ValueError("url is missing: the name of an archive in the model store, or a URL.")
    if "maxWorkers" in members and "minWorkers" not in members:
        raise ValueError("minWorkers is missing: maxWorkers has no meaning alone.")
    # The rows of the members only: a catalog may have thousands of entries.
    rows = {_ROWS[key].key: _ROWS[key] for key in members}
    return read_entry(rows.values(), members, refuse_value, lambda row: row.spellings)


def _object(value: object, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise WrongCatalog(f"{what} must be a JSON object.")
