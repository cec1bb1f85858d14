"""Where a catalog lies: what the stores of all kinds offer, and how one is chosen."""

from typing import NamedTuple, Protocol


class Document(NamedTuple):
    """A catalog as it lies there."""

    text: bytes
    revision: str  # of this text; another text has another


class StoreFailed(Exception):
    """A catalog cannot be read or written; a sentence for the operator."""


class StoreConflict(Exception):
    """The catalog is not of the revision any more that was to be replaced."""


class CatalogStore(Protocol):
    """A place where a catalog lies; whoever calls it sets a deadline."""

    #: How it is told to people, without secrets.
    place: str

    async def why_read_only(self) -> str:
        """Why it cannot be written, as far as that can be told without writing; else empty."""

    async def read(self, known: str = "") -> Document | None:
        """The catalog; or None where it is still of the revision ``known``.

        Raises:
            StoreFailed: It is not there, or cannot be read.
        """

    async def write(self, text: bytes, revision: str) -> str:
        """Replace the catalog of a revision, as a whole or not at all.

        Returns the new revision; empty where it is not told, and found by the next look.

        Raises:
            StoreConflict: Another revision lies there.
            StoreFailed: It cannot be written, or it is not known whether it was.
        """
