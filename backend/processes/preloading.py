"""Imported by the fork server before it forks: imports what workers will need, and keeps it.

An import, because that is all a fork server can be told to do; and the names come by an environment
variable, because one that fails with anything but ImportError, as torchvision does beside another
torch, would be the end of a fork server that is told to import it.

Workers share the memory of the fork server for as long as nobody writes to it, and the collector
writes to every object that is not frozen: a worker's first full collection made 60 MB its own.
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterable

#: Of the environment of the fork server alone: names of modules, separated by commas.
VARIABLE = "MARSERVE_FORK_SERVER_IMPORTS"


def preload(names: Iterable[str]) -> None:
    """Import modules; one that is not there is left out, one that fails is told on stderr."""
    for name in names:
        _try_import(name)
    gc.collect()
    gc.freeze()


def _try_import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a worker that needs it will tell, others live
        if not isinstance(error, ModuleNotFoundError) or error.name != name:
            print(f"{name} is not preloaded: {error}", file=sys.stderr)  # noqa: T201


if VARIABLE in os.environ:
    preload(filter(None, os.environ.pop(VARIABLE).split(",")))
