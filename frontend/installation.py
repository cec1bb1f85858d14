"""Whether what marserve installs is still its own.

TorchServe's packages bring the commands ``torchserve`` and ``torch-model-archiver`` and the import
names ``ts`` and ``model_archiver``, as marserve does, and pip lets each overwrite the other without
a word. Whatever was installed last works, until the other is uninstalled: then its files are gone.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_OURS = "marserve"
_THEIRS = ("torchserve", "torch-model-archiver")
_COMMANDS = frozenset(_THEIRS)
_PACKAGES = ("ts", "model_archiver")


def find_conflicts() -> str:
    """A sentence on what is not ours any more, or will not be; empty where all is well."""
    try:
        ours = metadata.distribution(_OURS)
        broken = [*_broken_commands(ours), *_broken_packages()]
        theirs = [name for name in _THEIRS if _is_installed(name)]
        if not broken and not theirs:
            return ""
        return " ".join([*_findings(broken, theirs), _advice(theirs, _source(ours))])
    except (ImportError, OSError, ValueError):
        return ""  # an installation of a kind that we cannot judge


def _findings(broken: Sequence[str], theirs: Sequence[str]) -> Iterator[str]:
    if broken:
        yield f"Another package has overwritten or removed {', '.join(broken)} of marserve."
    if theirs:
        names = " and ".join(theirs)
        yield f"TorchServe's {names} beside marserve: files of the same names overwrite each other."


def _advice(theirs: Sequence[str], source: str) -> str:
    pip = f"{sys.executable} -m pip"
    install = f"{pip} install --force-reinstall --no-deps {source}"
    if not theirs:
        return f"To mend that: {install}"
    return f"To mend that, in this order: {pip} uninstall -y {' '.join(theirs)}; {install}"


def _broken_commands(ours: metadata.Distribution) -> Iterator[str]:
    for file in ours.files or ():
        if file.name in _COMMANDS and not _is_ours(Path(str(file.locate()))):
            yield f"the command {file.name}"


def _broken_packages() -> Iterator[str]:
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is None or spec.origin is None or not _is_ours(Path(spec.origin)):
            yield f"the import name {name}"


def _is_ours(path: Path) -> bool:
    """Whether a file that marserve installs is the one it installed: each names it somewhere."""
    try:
        return _OURS in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _source(ours: metadata.Distribution) -> str:
    """What pip is to install again: the folder it was installed from, else the name."""
    origin = json.loads(ours.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if not url.startswith("file://"):
        return url or _OURS
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return f"-e {url[7:]}" if is_editable else url[7:]
