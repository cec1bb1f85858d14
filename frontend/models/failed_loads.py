"""Models that the start should have loaded and could not.

Each is remembered until it is registered, from whatever archive, or unregistered: as long as
somebody has asked for it and nobody serves it, the server is not ready.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from marserve.frontend.configuration.saved_models import SavedModel


@dataclass(frozen=True)
class FailedLoad:
    """One of them.

    Attributes:
        name: As it was to be registered.
        url: See `open_archive`.
        reason: Why it could not be loaded, in a sentence.
        version: Empty where it is not known.
        saved: What a snapshot remembers of it.
        is_name_implied: Whether nobody gave a name, so that it is the file's, and its manifest may
            say another one.
    """

    name: str
    url: str
    reason: str
    version: str = ""
    saved: SavedModel | None = None
    is_name_implied: bool = False

    def is_of(self, name: str, version: str | None) -> bool:
        """Whether it is what somebody means who says this; None for any version."""
        return self.name == name and (not version or self.version in ("", version))


class FailedLoads:
    """Those of a server, in the order in which they failed."""

    def __init__(self) -> None:
        self._loads: list[FailedLoad] = []

    def __iter__(self) -> Iterator[FailedLoad]:
        return iter(self._loads)

    def add(self, load: FailedLoad) -> None:
        """Remember one."""
        self._loads.append(load)

    def find(self, name: str, version: str | None = None) -> list[FailedLoad]:
        """Those of a name, or of one of its versions."""
        return [one for one in self._loads if one.is_of(name, version)]

    def registered(self, name: str, version: str, url: str) -> None:
        """A model is served now: forget what should have been in its place."""
        self._loads = [
            one
            for one in self._loads
            if not one.is_of(name, version) and not (one.is_name_implied and one.url == url)
        ]

    def remove(self, name: str, version: str | None = None) -> bool:
        """Nobody asks for it any more; whether anybody did."""
        found = self.find(name, version)
        self._loads = [one for one in self._loads if one not in found]
        return bool(found)
