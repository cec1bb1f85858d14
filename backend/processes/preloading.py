"""Imports the modules that workers need into the fork server, before it forks.

The fork server imports this module, and this module those in an environment variable. The fork
server could import them directly, but would end if one failed with anything but ImportError, as
torchvision does beside another version of torch.

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
    """Import modules; missing ones are skipped, and failing ones reported on stderr."""
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
