"""Imports of optional packages, and their programs."""

import importlib
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType


def need(module: str, package: str, user: str, *other_names: str) -> ModuleType:
    """Import a module of the distribution ``package`` for a ``user``, which errors name.

    ``other_names`` are those of the module in other releases.

    Raises:
        ImportError: It is not installed. Errors inside an installed package are raised unchanged.
    """
    names = (module, *other_names)
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
    if other_names:
        need(module.partition(".")[0], package, user)
        raise ImportError(f"{user} needs a release of {package} with {' or '.join(names)}")
    raise ImportError(
        f"{user} needs the package {package}, which is not installed: pip install {package}",
        name=module,
    )


def find_program(name: str) -> str | None:
    """Return the path of a program, also of this environment if that is not activated; or None."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return shutil.which(name, path=os.pathsep.join(places))
