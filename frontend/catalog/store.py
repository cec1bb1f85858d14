"""The interface of the stores that contain a catalog."""

from typing import NamedTuple, Protocol


class Document(NamedTuple):
    """The text of a catalog."""

    text: bytes
    revision: str  # differs for every text


class StoreFailed(Exception):
    """A catalog cannot be read; the text is for the operator."""


class CatalogStore(Protocol):
    """A file or URL that contains a catalog; callers set deadlines."""

    place: str  # for logs, without secrets

    async def read(self, known: str = "") -> Document | None:
        """Return the catalog, or None if it still has revision ``known``; raises StoreFailed."""
