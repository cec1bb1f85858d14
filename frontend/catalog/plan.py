"""Compare the wanted versions of a model with the registered ones, and plan the steps between them.

New versions come first, then the default version changes, and then old versions are unregistered:
a model that is served and still wanted always has a version that answers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from marserve.frontend.catalog.document import CatalogModel
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.configuration.model_schema import LIVE
from marserve.frontend.configuration.setting import Fields
from marserve.frontend.settings.layers import attributes_of

# The attributes of settings that can be changed while a model is served.
_LIVE = frozenset(attributes_of(LIVE))


@dataclass(frozen=True)
class Step:
    """A change of one version of a model."""

    version: str


class SetDefault(Step):
    """Make a version the default version."""


class Unregister(Step):
    """Unregister a version."""


@dataclass(frozen=True)
class EntryStep(Step):
    """A change after which the version is registered as ``entry``."""

    entry: ModelEntry


class Register(EntryStep):
    """Register a version."""


class Replace(EntryStep):
    """Load a version again beside the one that is served, which it then replaces."""


class Scale(EntryStep):
    """Change the number of workers of a version."""


class Reconfigure(EntryStep):
    """Change settings of a version while it is served."""


def plan(wanted: CatalogModel | None, registered: CatalogModel | None) -> list[Step]:
    """Return the steps for one model, in order; None means not wanted, or not registered."""
    present = registered.versions if registered else {}
    default = registered.default if registered else ""
    if wanted is None:
        return [
            Unregister(version) for version in sorted(present, key=lambda each: each == default)
        ]
    # The default version first, which serves most requests; and quick steps before loads.
    versions = sorted(wanted.versions, key=lambda each: each != wanted.default)
    steps = [
        step
        for version in versions
        for step in _steps_of(version, present.get(version), wanted.versions[version])
    ]
    steps.sort(key=lambda step: isinstance(step, Register | Replace))
    # The first version of a name that is registered becomes its default version.
    if registered and default != wanted.default:
        steps.append(SetDefault(wanted.default))
    return steps + [Unregister(version) for version in present if version not in wanted.versions]


def _steps_of(version: str, present: ModelEntry | None, wanted: ModelEntry) -> Iterator[Step]:
    if present is None:
        yield Register(version, wanted)
    elif not can_become(present, wanted):
        yield Replace(version, wanted)
    else:
        if present.settings != wanted.settings:
            present = replace(present, settings=wanted.settings)
            yield Reconfigure(version, present)
        if wanted.workers is not None and wanted.workers != present.workers:
            yield Scale(version, wanted)


def can_become(present: ModelEntry, wanted: ModelEntry) -> bool:
    """Return whether a version can change from one entry to another while it is served.

    The value of another setting that is no longer set comes from the archive or the configuration,
    which only a new registration reads.
    """
    is_same = replace(present, workers=wanted.workers, settings=wanted.settings) == wanted
    is_unset = present.workers is not None and wanted.workers is None
    return is_same and not is_unset and _fixed(present) == _fixed(wanted)


def _fixed(entry: ModelEntry) -> Fields:
    return {name: value for name, value in entry.settings.items() if name not in _LIVE}
