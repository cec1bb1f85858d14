"""The interface of the stores that contain a catalog."""

from typing import NamedTuple, Protocol


class Document(NamedTuple):
    """The text of a catalog."""

    text: bytes
    revision: str  # differs for every text


class StoreFailed(Exception):
    """A catalog cannot be read or written; the text is for the operator."""


class StoreConflict(Exception):
    """The catalog has changed since it was read."""


class CatalogStore(Protocol):
    """A file or URL that contains a catalog; callers set deadlines."""

    place: str  # for logs, without secrets

    async def why_read_only(self) -> str:
        """Return why it cannot be written, without trying; empty if it perhaps can."""

    async def read(self, known: str = "") -> Document | None:
        """Return the catalog, or None if it still has revision ``known``; raises StoreFailed."""

    async def write(self, text: bytes, revision: str) -> str:
        """Replace the catalog of a revision atomically; return the new revision.

        That is empty if only the next `read` can determine it.

        Raises:
            StoreConflict: The catalog has another revision.
            StoreFailed: It cannot be written, or it is not known whether it was.
        """
