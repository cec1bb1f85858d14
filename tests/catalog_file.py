"""A catalog in a file, whose models the tests change as operators do: by a new file."""

import json
from pathlib import Path
from typing import Any


def write(path: Path, models: dict[str, Any]) -> None:
    """Replace the catalog at once."""
    new = path.with_name("new")
    new.write_text(json.dumps({"models": models}))
    new.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Return the models of the catalog."""
    models: dict[str, Any] = json.loads(path.read_text())["models"]
    return models


def change(path: Path, name: str, versions: dict[str, Any] | None) -> None:
    """Change the versions of one model; None removes it."""
    models = read(path)
    models.pop(name, None)
    write(path, models | ({name: versions} if versions else {}))
