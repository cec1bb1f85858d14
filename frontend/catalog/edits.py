"""The changes of a catalog by management requests, as pure functions of a catalog."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from marserve.frontend.catalog.document import (
    ROWS,
    Catalog,
    CatalogEntry,
    CatalogModel,
    WrongCatalog,
    as_read,
)
from marserve.frontend.configuration.model_schema import LIVE
from marserve.frontend.configuration.setting import Fields
from marserve.frontend.errors import (
    DefaultVersionInUse,
    ModelNotFound,
    VersionConflict,
    VersionNotFound,
)
from marserve.frontend.settings.layers import CATALOG, REQUEST, attributes_of, merged
from marserve.frontend.settings.model_settings import ModelSettings

#: Returns a changed catalog, or raises the ServeError for the client, or WrongCatalog.
Edit = Callable[[Catalog], Catalog]


def added(name: str, version: str, entry: CatalogEntry) -> Edit:
    """Add a version, which becomes the default if it is the first; VersionConflict if it exists."""

    def edit(catalog: Catalog) -> Catalog:
        model = _readable(catalog.get(name)) or CatalogModel(version, {})
        if version in model.versions:
            raise VersionConflict(
                f"Model version {version} is already registered for model {name}: "
                "the catalog has it."
            )
        return {**catalog, name: replace(model, versions={**model.versions, version: entry})}

    return edit


def with_workers(name: str, version: str | None, low: int, high: int) -> Edit:
    """Set the number of workers of a version; None: the default version."""
    return partial(_changed, name, version, lambda entry: replace(entry, workers=(low, high)))


def with_settings(name: str, version: str | None, changes: Fields) -> Edit:
    """Change settings of a version; None: the default version."""

    def change(entry: CatalogEntry) -> CatalogEntry:
        return as_read(replace(entry, settings=merged(entry.settings, changes)))

    return partial(_changed, name, version, change)


def with_default(name: str, version: str) -> Edit:
    """Make a version the default version."""

    def edit(catalog: Catalog) -> Catalog:
        model, _ = find(catalog, name, None)
        if version not in model.versions:  # as `ModelRegistry.set_default`
            raise VersionNotFound(f"Model version {version} does not exist for model {name}")
        return {**catalog, name: replace(model, default=version)}

    return edit


def without(name: str, version: str | None) -> Edit:
    """Remove a version; None: the default version, which must be the last one."""

    def edit(catalog: Catalog) -> Catalog:
        model, found = find(catalog, name, version)
        others = {each: entry for each, entry in model.versions.items() if each != found}
        if others and found == model.default:
            raise DefaultVersionInUse(f"Cannot remove default version for model {name}")
        remaining = {each: other for each, other in catalog.items() if each != name or others}
        return {**remaining, name: replace(model, versions=others)} if others else remaining

    return edit


def find(catalog: Catalog, name: str, version: str | None) -> tuple[CatalogModel, str]:
    """Return a model and one of its versions; None: the default version."""
    model = _readable(catalog.get(name))
    if model is None:
        raise ModelNotFound(f"Model not found: {name}")
    version = model.default if version is None else version
    if version not in model.versions:
        raise VersionNotFound(f"Model version: {version} does not exist for model: {name}")
    return model, version


def chosen_settings(settings: ModelSettings) -> Fields:
    """Return the settings of a model that requests or a catalog have set, by attribute."""
    values, origins = settings.values, settings.origins
    chosen = (row for row in ROWS if origins.get(row.name) in (REQUEST, CATALOG))
    return {name: values[name] for name in attributes_of(chosen)}


def _readable(model: CatalogModel | None) -> CatalogModel | None:
    """Return a model; raises WrongCatalog if its text could not be read."""
    if model is not None and model.wrong:
        raise WrongCatalog(model.wrong)
    return model


#: The attributes of settings that can be changed while a model is served.
LIVE_ATTRIBUTES = frozenset(attributes_of(LIVE))


def _changed(
    name: str, version: str | None, change: Callable[[CatalogEntry], CatalogEntry], catalog: Catalog
) -> Catalog:
    model, found = find(catalog, name, version)
    versions = {**model.versions, found: change(model.versions[found])}
    return {**catalog, name: replace(model, versions=versions)}
