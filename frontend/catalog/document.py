"""Read the text of a catalog: the wanted models with their versions and settings.

    {"models": {NAME: {VERSION: {"url": "digits.mar", "defaultVersion": true, "minWorkers": 2}}}}

The format is JSON because a part of a JSON file is not valid, while a part of a YAML file may be a
catalog with fewer models. The keys are those of ``models`` in config.properties and of snapshots. A
model with an unknown key or a wrong value is skipped as a whole, and its earlier entry stays; the
other models are applied. So a key that only newer servers know does not stop older ones.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from marserve.backend.manifest import RUNTIMES
from marserve.frontend.configuration.model_schema import (
    BY_KEY,
    BY_SPELLING,
    MAX_WORKERS,
)
from marserve.frontend.configuration.setting import Fields, read_settings, wrong_value
from marserve.frontend.configuration.setting_kinds import is_whole
from marserve.frontend.configuration.unread_keys import advice_for_model
from marserve.frontend.logs.formats import excerpt

#: Of a document.
MAX_BYTES = 4 << 20
WORKERS = ("minWorkers", "maxWorkers")
#: The settings that an entry may have, except for its workers.
_SPELLINGS = {
    name: row
    for name, row in BY_SPELLING.items()
    if "models" in row.sources and row.key not in WORKERS
}
_TEXTS = ("url", "handler", "runtimeType")
_FLAGS = ("defaultVersion", "s3SseKms")
#: The attributes of entries that are not settings, by key.
_ATTRIBUTES = {
    "url": "url",
    "handler": "handler",
    "runtimeType": "runtime",
    "s3SseKms": "s3_sse_kms",
}
_OWN = (*_TEXTS, *_FLAGS, *WORKERS)
_USUAL = [*_OWN, *(key for key, row in BY_KEY.items() if "models" in row.sources)]
#: The search for a similar name takes 0.2 ms; usually all models have the same unknown key.
_advice = lru_cache(maxsize=256)(partial(advice_for_model, known=_USUAL))


class WrongCatalog(ValueError):
    """A text that is not a catalog; the sentence is for the operator."""


@dataclass(frozen=True)
class CatalogEntry:
    """The wanted state of one version of a model."""

    url: str
    handler: str = ""  # replaces the manifest's
    runtime: str = ""
    s3_sse_kms: bool = False
    workers: tuple[int, int] | None = None  # minimum and maximum; None: as configured
    settings: Fields = field(default_factory=dict)  # by attribute of `model_schema`


@dataclass(frozen=True)
class CatalogModel:
    """The wanted versions of a model; if its text is wrong, none, or those wanted before."""

    default: str  # version that serves requests without a version
    versions: Mapping[str, CatalogEntry]
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
    entries: dict[str, CatalogEntry] = {}
    defaults = []
    for version, value in _object(versions, name).items():
        which = f"{name} {version}"
        members = _object(value, which)
        try:
            entries[version] = _read_entry(members)
        except ValueError as error:
            raise WrongCatalog(f"{which}: {error}") from error
        if members.get("defaultVersion"):
            defaults.append(version)
    if not name or not all(entries):
        raise WrongCatalog("a model has an empty name or version.")
    if not entries:
        raise WrongCatalog(f"{name} has no versions; leave it out to unregister it.")
    defaults = defaults or ([*entries] if len(entries) == 1 else [])
    if len(defaults) != 1:
        raise WrongCatalog(
            f"{name} has {len(entries)} versions; exactly one needs defaultVersion: true."
        )
    return CatalogModel(defaults[0], entries)


def _read_entry(members: Mapping[str, Any]) -> CatalogEntry:
    for key, value in members.items():
        if key not in _OWN and key not in _SPELLINGS:
            raise ValueError(f"{key[:80]!r} is unknown{_advice(key)}")
        if key in _TEXTS and not (isinstance(value, str) and value and value.isprintable()):
            raise ValueError(wrong_value(key, value, "a text"))
        if key in _FLAGS and not isinstance(value, bool):
            raise ValueError(wrong_value(key, value, "true or false"))
    if "url" not in members:
        raise ValueError("url is missing: the name of an archive in the model store, or a URL.")
    if members.get("runtimeType", RUNTIMES[0]) not in RUNTIMES:
        raise ValueError(wrong_value("runtimeType", members["runtimeType"], " or ".join(RUNTIMES)))
    values = {key: value for key, value in members.items() if key in _SPELLINGS}
    if None in values.values():
        raise ValueError("null is not a value of a setting; leave it out.")
    rows = {_SPELLINGS[key].key: _SPELLINGS[key] for key in values}
    own = {name: members[key] for key, name in _ATTRIBUTES.items() if key in members}
    settings = read_settings(rows.values(), values, names=lambda row: row.spellings)
    return CatalogEntry(**own, workers=_read_workers(members), settings=settings)


def _read_workers(members: Mapping[str, Any]) -> tuple[int, int] | None:
    if not any(key in members for key in WORKERS):
        return None
    low: Any = members.get("minWorkers")
    high = members.get("maxWorkers", low)
    if not is_whole(low, 0, MAX_WORKERS):
        raise ValueError(wrong_value("minWorkers", low, f"a whole number from 0 to {MAX_WORKERS}"))
    if not is_whole(high, low, MAX_WORKERS):
        rule = f"a whole number from minWorkers to {MAX_WORKERS}"
        raise ValueError(wrong_value("maxWorkers", high, rule))
    return low, high


def _object(value: object, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise WrongCatalog(f"{what} must be a JSON object.")
