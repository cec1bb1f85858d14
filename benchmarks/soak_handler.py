"""Gives every request its own body back, but for those that ask for an error."""

from typing import Any


def handle(data: Any, _context: Any) -> Any:
    """Initialise (``data`` is None), or answer a batch.

    Raises:
        ValueError: A request asked for it.
    """
    if data is None:
        return None
    bodies = [row["body"] for row in data]
    if b"raise" in bodies:
        raise ValueError("as was asked for")
    return bodies
