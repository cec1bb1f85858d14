"""Modules of an archive that have the name of a module that is already imported.

Python does not import a name twice. A worker that is forked has imported what the fork server has,
of which its archive knows nothing: ``statistics.py`` of an archive would be ignored. TorchServe's
worker has imported less, and there the archive's module is found. So such a worker starts in an
interpreter of its own (`backend.processes.fork_server`), in which few modules are imported before
those of the archive (`give_way`).
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder

_TORCHSERVE = """
abc argparse array ast asyncio atexit base64 binascii bisect builtins bz2 calendar cmath
codecs collections concurrent contextlib contextvars copy copyreg csv ctypes cuda
dataclasses datetime difflib dis email encodings enum errno fcntl fnmatch functools gc
genericpath gettext glob grp gzip hashlib heapq http importlib inspect io ipaddress
itertools json keyword linecache locale logging lzma marshal math mmap multiprocessing
ntpath numbers numpy opcode operator os pathlib pickle pickletools pkgutil platform posix
posixpath pprint psutil pwd queue quopri random re reprlib resource runpy select selectors
shutil signal site socket ssl stat string struct subprocess sys sysconfig tarfile tempfile
textwrap threading time timeit token tokenize torch torchgen tqdm traceback types typing
typing_extensions unicodedata unittest urllib uuid warnings weakref yaml zipfile zipimport
zlib
"""
#: What TorchServe's worker (0.12.0) has imported before it looks for the handler, so that it does
#: not find an archive's module of such a name; and marserve's own packages.
IMPORTED_BEFORE = frozenset(_TORCHSERVE.split()) | {"marserve", "ts"}


def hidden_names(directories: Iterable[str]) -> set[str]:
    """Return the modules in directories, the first of ``sys.path``, that an import does not find.

    These are names of ``sys.modules`` that came from elsewhere, except for `IMPORTED_BEFORE`.
    """
    return (_modules_in(directories).keys() & sys.modules.keys()) - IMPORTED_BEFORE


def give_way(directories: Sequence[str], model_dir: str) -> None:
    """Let an archive's modules be found that TorchServe's worker finds, and no others.

    ``directories`` are the first entries of ``sys.path``, about to be added. Of `IMPORTED_BEFORE`,
    what the archive in ``model_dir`` has is imported now. Other imported modules are forgotten if
    the directories have them; modules that have imported them keep them.
    """
    archive = os.path.realpath(model_dir) + os.sep
    modules = _modules_in(directories)
    refused = [
        name
        for name, origin in modules.items()
        if name in IMPORTED_BEFORE and origin.startswith(archive)
    ]
    for name in refused:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if refused:
        print(  # noqa: T201
            f"These modules of the model are not imported: {', '.join(sorted(refused))}. A worker, "
            "also that of TorchServe, has imported others of these names before."
        )
    for name in modules.keys() - IMPORTED_BEFORE:
        for each in [*sys.modules]:
            if each == name or each.startswith(f"{name}."):
                del sys.modules[each]


def _modules_in(directories: Iterable[str]) -> dict[str, str]:
    """Return the modules with names of imported ones, or of `IMPORTED_BEFORE`, and their files."""
    paths = [*directories]
    names = set[str]()
    for path in paths:
        with contextlib.suppress(OSError), os.scandir(path) as entries:  # PYTHONPATH may be wrong
            names.update(each.name.partition(".")[0] for each in entries)
    found = {}
    for name in names & (sys.modules.keys() | IMPORTED_BEFORE):
        spec = None if name.startswith("_") else PathFinder.find_spec(name, paths)
        if spec is None or spec.origin is None:  # a folder without __init__.py hides nothing
            continue
        imported = getattr(sys.modules.get(name), "__spec__", None)
        if imported is None or imported.origin != spec.origin:
            found[name] = spec.origin
    return found
