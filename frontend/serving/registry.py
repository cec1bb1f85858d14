"""The models that are served, by name and version, and those that could not be loaded.

Only `registration.manager.ModelManager` changes the registry.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeVar

from marserve.frontend.archives.archive import implied_model_name
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.errors import (
    DefaultVersionInUse,
    ModelNotFound,
    ModelNotYetLoaded,
    VersionConflict,
    VersionNotFound,
)
from marserve.frontend.serving.model_version import ModelVersion

_Index = TypeVar("_Index")


@dataclass(frozen=True)
class FailedLoad:
    """A model that could not be loaded; the reason is a sentence."""

    name: str
    url: str
    reason: str
    version: str = ""  # empty if it is not known
    saved: ModelEntry | None = None  # its entry in a snapshot
    is_name_implied: bool = False  # the name is the file's; the manifest may have another
    is_awaited: bool = True  # whether the server is not ready without it


class FailedLoads:
    """Models that could not be loaded, at start or from a catalog, perhaps thousands.

    An entry is removed when the model is registered, from any archive, or unregistered.
    """

    def __init__(self) -> None:
        self._by_name: defaultdict[str, list[FailedLoad]] = defaultdict(list)
        #: Names of the models without which the server is not ready. Each readiness check reads it.
        self.awaited: set[str] = set()

    def __iter__(self) -> Iterator[FailedLoad]:
        return chain.from_iterable(self._by_name.values())

    def listed(self) -> Iterable[FailedLoad]:
        """Return entries for lists and metrics, at most 1000."""
        return islice(self, 1000)

    def append(self, load: FailedLoad) -> None:
        """Add an entry."""
        self._by_name[load.name].append(load)
        if load.is_awaited:
            self.awaited.add(load.name)

    def replace(self, name: str, loads: Iterable[FailedLoad]) -> None:
        """Replace the entries of a name."""
        self._by_name.pop(name, None)
        self.awaited.discard(name)
        for load in loads:
            self.append(load)

    def find(self, name: str, version: str | None = None) -> list[FailedLoad]:
        """Return the entries of a name, or of one of its versions."""
        loads = self._by_name.get(name, ())
        return [load for load in loads if not version or load.version in ("", version)]

    def registered(self, name: str, version: str, url: str) -> None:
        """Remove the entries of a model that has been registered."""
        self.forget(name, version)
        implied = implied_model_name(url)
        others = (x for x in self.find(implied) if not x.is_name_implied or x.url != url)
        self.replace(implied, others)

    def forget(self, name: str, version: str | None) -> bool:
        """Remove the entries of a name or version; return whether there were any."""
        found = self.find(name, version)
        self.replace(name, [load for load in self.find(name) if load not in found])
        return bool(found)


@dataclass
class CatalogProgress:
    """How far the registered models are those of a catalog, if there is one."""

    is_known: bool = True  # whether the catalog has been read; the server is not ready before
    awaited: set[str] = field(default_factory=set)  # models without which it is not ready
    trouble: str = ""  # what is not as the catalog wants it, a sentence for operators


@dataclass
class _Versions:
    default: str
    by_version: dict[str, ModelVersion] = field(default_factory=dict)


class ModelRegistry:
    """All models by name and version. The first version of a name becomes its default."""

    def __init__(self) -> None:
        self._models: dict[str, _Versions] = {}
        self._indexes: dict[Callable[[ModelRegistry], Any], Any] = {}
        #: Whether the server is about to stop, so that new requests should go to another.
        self.is_leaving = False
        #: Models that could not be loaded, and are therefore not registered.
        self.failed = FailedLoads()
        self.catalog_progress = CatalogProgress()

    def __iter__(self) -> Iterator[ModelVersion]:
        for versions in self._models.values():
            yield from versions.by_version.values()

    def defaults(self) -> list[ModelVersion]:
        """Return the default version of every model, sorted by name."""
        return [each.by_version[each.default] for _, each in sorted(self._models.items())]

    def index(self, make: Callable[["ModelRegistry"], _Index]) -> _Index:
        """Return what a function makes of the models; it is called again when they have changed."""
        if make not in self._indexes:
            self._indexes[make] = make(self)
        index: _Index = self._indexes[make]
        return index

    def has(self, name: str, version: str) -> bool:
        """Return whether a version is registered."""
        return name in self._models and version in self._models[name].by_version

    def default(self, name: str) -> ModelVersion | None:
        """Return the default version of a model, or None."""
        versions = self._models.get(name)
        return None if versions is None else versions.by_version[versions.default]

    def find(self, name: str, version: str | None = None) -> ModelVersion:
        """Return a version, by default the default one; raises ModelNotFound, VersionNotFound."""
        versions = self._find(name)
        model = versions.by_version.get(versions.default if version is None else version)
        if model is None:
            self._check_complete(name)
            sentence = f"Model version: {version} does not exist for model: {name}"
            raise VersionNotFound(self._with_reason(sentence, name, version))
        return model

    def versions(self, name: str) -> list[ModelVersion]:
        """Return all versions of a model, sorted as texts; raises ModelNotFound for none."""
        return [model for _, model in sorted(self._find(name).by_version.items())]

    def add(self, model: ModelVersion) -> None:
        """Register a version; raises VersionConflict if it is registered already."""
        self.check_absent(model)
        self._indexes.clear()
        versions = self._models.setdefault(model.name, _Versions(model.version))
        versions.by_version[model.version] = model

    def check_absent(self, model: ModelVersion) -> None:
        """Raise VersionConflict if such a version is registered."""
        if self.has(model.name, model.version):
            raise VersionConflict(
                f"Model version {model.version} is already registered for model {model.name}"
            )

    def remove(self, model: ModelVersion) -> None:
        """Remove a version, if registered; raises DefaultVersionInUse if others than it exist."""
        versions = self._models.get(model.name)
        if versions is None or versions.by_version.get(model.version) is not model:
            return
        if versions.default == model.version and len(versions.by_version) > 1:
            raise DefaultVersionInUse(f"Cannot remove default version for model {model.name}")
        self._indexes.clear()
        del versions.by_version[model.version]
        if not versions.by_version:
            del self._models[model.name]

    def replace(self, model: ModelVersion, successor: ModelVersion) -> None:
        """Replace a registered model by another of the same name and version.

        Raises:
            ModelNotFound, VersionNotFound: It has been removed or replaced meanwhile.
        """
        if self.find(model.name, model.version) is not model:
            raise VersionNotFound(f"Version {model.version} of {model.name} has been replaced")
        self._indexes.clear()
        self._models[model.name].by_version[model.version] = successor

    def set_default(self, name: str, version: str) -> None:
        """Choose the version for requests without one; raises as `find` does."""
        versions = self._find(name)
        if version not in versions.by_version:
            raise VersionNotFound(f"Model version {version} does not exist for model {name}")
        self._indexes.clear()
        versions.default = version

    def _find(self, name: str) -> _Versions:
        versions = self._models.get(name)
        if versions is None:
            self._check_complete(name)
            raise ModelNotFound(self._with_reason(f"Model not found: {name}", name, None))
        return versions

    def _check_complete(self, name: str) -> None:
        """Raise ModelNotYetLoaded for a model of the catalog that is not loaded yet.

        Its status, 503, makes a balancer try another server.
        """
        progress = self.catalog_progress
        if (name in progress.awaited or not progress.is_known) and not self.failed.find(name):
            raise ModelNotYetLoaded(f"Model not loaded yet: {name}")

    def _with_reason(self, sentence: str, name: str, version: str | None) -> str:
        """Append the reason of a failed load to TorchServe's sentence."""
        failed = self.failed.find(name, version)
        return f"{sentence}. It could not be loaded: {failed[0].reason}" if failed else sentence
