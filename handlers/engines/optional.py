"""Packages that one handler needs and most servers do not have."""

import importlib
from types import ModuleType


def need(module: str, package: str, who: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: Full name of the module.
        package: What pip knows the package as.
        who: What needs it, for the sentence.

    Raises:
        ImportError: It is not installed; the message says what to install. What goes wrong inside
            an installed package is raised as it is.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ImportError(
            f"{who} needs the package {package}, which is not installed: pip install {package}",
            name=error.name,
        ) from error


def first_of(modules: list[str], package: str, who: str) -> ModuleType:
    """Import the first of the modules that there is: packages move things between releases.

    Raises:
        ImportError: There is none of them.
    """
    need(modules[-1].partition(".")[0], package, who)
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
    raise ImportError(f"{who} knows no release of {package} without {', '.join(modules)}")
