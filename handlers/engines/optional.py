"""Imports of optional packages."""

import importlib
from types import ModuleType


def need(module: str, package: str, user: str) -> ModuleType:
    """Import a module of the distribution ``package`` for a ``user``, which the error names.

    Raises:
        ImportError: It is not installed; the message has the pip command. Errors inside an
            installed package are raised unchanged.
    """
    found = _import_first([module])
    if found is None:
        raise ImportError(
            f"{user} needs the package {package}, which is not installed: pip install {package}",
            name=module,
        )
    return found


def first_of(modules: list[str], package: str, user: str) -> ModuleType:
    """Import the first existing module; its name depends on the package's release.

    Raises:
        ImportError: None of them exists.
    """
    need(modules[0].partition(".")[0], package, user)
    found = _import_first(modules)
    if found is None:
        raise ImportError(f"{user} needs a release of {package} with {' or '.join(modules)}")
    return found


def _import_first(modules: list[str]) -> ModuleType | None:
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
    return None
