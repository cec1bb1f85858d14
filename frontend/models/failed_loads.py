"""Models that the start should have loaded and could not; with any of them no server is ready."""

from collections.abc import Iterator
from dataclasses import dataclass

from marserve.frontend.configuration.saved_models import SavedModel


@dataclass(frozen=True)
class FailedLoad:
    """A model that could not be loaded, and why, in a sentence."""

    name: str
    url: str
    reason: str
    version: str = ""  # empty where it is not known
    saved: SavedModel | None = None  # what a snapshot remembers of it
    is_name_implied: bool = False  # by the file: its manifest may have another

    def matches(self, name: str, version: str | None) -> bool:
        """Whether a name and version, None for any, mean it."""
        return self.name == name and (not version or self.version in ("", version))


class FailedLoads:
    """Those of a server, in the order in which they failed.

    Each stays until it is registered, from whatever archive, or unregistered.
    """

    def __init__(self) -> None:
        self._loads: list[FailedLoad] = []

    def __iter__(self) -> Iterator[FailedLoad]:
        return iter(self._loads)

    def add(self, load: FailedLoad) -> None:
        """Remember a model that could not be loaded."""
        self._loads.append(load)

    def find(self, name: str, version: str | None = None) -> list[FailedLoad]:
        """Those of a name, or of one of its versions."""
        return [load for load in self._loads if load.matches(name, version)]

    def registered(self, name: str, version: str, url: str) -> None:
        """Forget what should have been in the place of a model that is served now."""
        self._loads = [
            load
            for load in self._loads
            if not load.matches(name, version) and not (load.is_name_implied and load.url == url)
        ]

    def remove(self, name: str, version: str | None = None) -> bool:
        """Forget what is unregistered; whether there was any."""
        found = self.find(name, version)
        self._loads = [load for load in self._loads if load not in found]
        return bool(found)
