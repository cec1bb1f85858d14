"""The names of TorchServe that are the same here, and new ones."""

from pathlib import Path

_NAMES = Path(__file__).parents[3] / "tools" / "doctor" / "names.md"


def torchserve_names() -> str:
    """Return the lists of names, without the heading of the file."""
    return _NAMES.read_text(encoding="utf-8").partition("\n")[2]
