"""The difference between the models that are wanted and those that are registered, as steps.

New versions come first, then the default moves, and only then old versions go: at no moment a model
that is wanted and served is without a version that answers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from marserve.frontend.catalog.document import CatalogEntry, CatalogModel
from marserve.frontend.catalog.edits import LIVE_ATTRIBUTES
from marserve.frontend.configuration.setting import Fields


@dataclass(frozen=True)
class Register:
    """Register a version."""

    version: str
    entry: CatalogEntry


@dataclass(frozen=True)
class Replace:
    """Register a version anew beside the one that is served, which it then replaces."""

    version: str
    entry: CatalogEntry


@dataclass(frozen=True)
class Reconfigure:
    """Change settings of a version while it is served."""

    version: str
    changes: Fields
    entry: CatalogEntry  # what it is as registered from then on


@dataclass(frozen=True)
class Scale:
    """Change how many workers a version has."""

    version: str
    workers: tuple[int, int]
    entry: CatalogEntry  # what it is as registered from then on


@dataclass(frozen=True)
class SetDefault:
    """Make a version the default one."""

    version: str


@dataclass(frozen=True)
class Unregister:
    """Unregister a version."""

    version: str


Step = Register | Replace | Reconfigure | Scale | SetDefault | Unregister


def plan(wanted: CatalogModel | None, registered: CatalogModel | None) -> list[Step]:
    """What to do about one model, in order; None where it is not wanted, or not registered."""
    there = registered.versions if registered else {}
    if wanted is None:
        default = registered.default if registered else ""
        return [Unregister(version) for version in sorted(there, key=lambda each: each == default)]
    # The default one first, which most wait for; and what takes a moment before what takes long.
    versions = sorted(wanted.versions, key=lambda each: each != wanted.default)
    steps = [
        step
        for version in versions
        for step in _steps_of(version, there.get(version), wanted.versions[version])
    ]
    steps.sort(key=lambda step: isinstance(step, Register | Replace))
    # The first version that is registered of a name becomes its default by itself.
    default = registered.default if registered else wanted.default
    if default != wanted.default:
        steps.append(SetDefault(wanted.default))
    return steps + [Unregister(version) for version in there if version not in wanted.versions]


def _steps_of(version: str, there: CatalogEntry | None, wanted: CatalogEntry) -> Iterator[Step]:
    if there is None:
        yield Register(version, wanted)
    elif not can_become(there, wanted):
        yield Replace(version, wanted)
    else:
        if changes := _changes(there, wanted):
            there = replace(there, settings=wanted.settings)
            yield Reconfigure(version, changes, there)
        if wanted.workers is not None and wanted.workers != there.workers:
            yield Scale(version, wanted.workers, wanted)


def can_become(there: CatalogEntry, wanted: CatalogEntry) -> bool:
    """Whether one entry can become the other while the model is served.

    What an entry no longer sets can only be found anew from the archive and the configuration.
    """
    is_same = replace(there, workers=wanted.workers, settings=wanted.settings) == wanted
    if not is_same or (there.workers is not None and wanted.workers is None):
        return False
    dropped = there.settings.keys() - wanted.settings.keys()
    if wanted.settings.get("is_automatic"):
        dropped -= {"size"}  # it is found by measuring from now on
    return not dropped and _changes(there, wanted).keys() <= LIVE_ATTRIBUTES


def _changes(there: CatalogEntry, wanted: CatalogEntry) -> Fields:
    """The settings that one entry has otherwise than the other, or has alone."""
    missing = object()
    return {
        name: value
        for name, value in wanted.settings.items()
        if there.settings.get(name, missing) != value
    }
