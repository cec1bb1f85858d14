"""Packages that one handler needs and most servers do not have."""

import importlib
from types import ModuleType


def need(module: str, package: str, who: str) -> ModuleType:
    """Import a module of an optional package, which pip knows as ``package``, for ``who``.

    Raises:
        ImportError: It is not installed; the message says what to install. What goes wrong inside
            an installed package is raised as it is.
    """
    found = _import_first([module])
    if found is None:
        raise ImportError(
            f"{who} needs the package {package}, which is not installed: pip install {package}",
            name=module,
        )
    return found


def first_of(modules: list[str], package: str, who: str) -> ModuleType:
    """Import the first of the modules that there is: packages move things between releases.

    Raises:
        ImportError: There is none of them.
    """
    need(modules[0].partition(".")[0], package, who)
    found = _import_first(modules)
    if found is None:
        raise ImportError(f"{who} knows no release of {package} without {', '.join(modules)}")
    return found


def _import_first(modules: list[str]) -> ModuleType | None:
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
    return None
