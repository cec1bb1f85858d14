"""What a server that starts says in its log: its surroundings and settings, and what is broken.

TorchServe's packages bring the commands ``torchserve``, ``torch-model-archiver`` and
``torch-workflow-archiver`` and the import names ``ts``, ``model_archiver`` and
``workflow_archiver``, as marserve does, and pip lets each overwrite the other without a word.
Whatever was installed last works, until the other is uninstalled: then its files are gone.
"""

import csv
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from marserve.frontend.configuration.config import KEYS, Config
from marserve.frontend.configuration.values import without_secrets
from marserve.frontend.logs.setup import log_directories
from marserve.frontend.version import __version__

_SECRETS = frozenset({"keystore_pass"})
_MAX_LENGTH = 500  # characters of a value

_OURS = "marserve"
# Packages, and their commands.
_THEIRS = ("torchserve", "torch-model-archiver", "torch-workflow-archiver")
_PACKAGES = ("ts", "model_archiver", "workflow_archiver")


def banner(config: Config, *, gpus: int, cores: int, workdir: Path) -> str:
    """The surroundings, then every key of the configuration with the text that is in force.

    ``gpus`` are those that will be used, ``cores`` the CPUs that the server may use; archives are
    unpacked in ``workdir``.
    """
    logs, metrics = (directory.absolute() for directory in log_directories())
    facts = {
        "Version": f"marserve {__version__}",
        "Home": Path(__file__).resolve().parent,
        "Current directory": Path.cwd(),
        "Temp directory": workdir,
        "Number of GPUs": gpus,
        "Number of CPUs": cores,
        "Python executable": f"{sys.executable} ({platform.python_version()})",
        "Process id": os.getpid(),
        "Log dir": logs,
        "Metrics dir": metrics,
        "Model API enabled": str(config.model_api).lower(),
        "Token authorization": str(config.token_authorization).lower(),
    }
    texts = {**config.texts, **config.platform.texts}
    for key in KEYS.values():
        text = texts.get(key.name, key.default)
        if text is not None:
            is_pattern = key.name == "allowed_urls"  # in which "?" begins no query
            line = " ".join((text if is_pattern else without_secrets(text)).split())
            shortened = line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]}..."
            facts[key.name] = "***" if key.name in _SECRETS else shortened
    lines = [f"{name}: {value}" for name, value in facts.items()]
    return "\n".join([f"marserve {__version__} starts.", *lines])


def find_conflicts() -> str:
    """A sentence on what is not ours any more, or will not be; empty where all is well."""
    try:
        ours = metadata.distribution(_OURS)
        broken = [*_broken_commands(ours), *_broken_packages()]
        theirs = [name for name in _THEIRS if any(metadata.distributions(name=name))]
        source = _source(ours)
    except (ImportError, OSError, ValueError):
        return ""  # an installation of a kind that we cannot judge
    found = ""
    pip = f"{sys.executable} -m pip"
    install = f"{pip} install --force-reinstall --no-deps {source}"
    advice = f"To mend that: {install}"
    if broken:
        found = f"Another package has overwritten or removed {', '.join(broken)} of marserve. "
    if theirs:
        names = " and ".join(theirs)
        found += (
            f"TorchServe's {names} beside marserve: files of the same names overwrite each other. "
        )
        uninstall = f"{pip} uninstall -y {' '.join(theirs)}"
        advice = f"To mend that, in this order: {uninstall}; {install}"
    return found and found + advice


def _broken_commands(ours: metadata.Distribution) -> Iterator[str]:
    # Not `ours.files`: since Python 3.12 that leaves out what is gone.
    for row in csv.reader((ours.read_text("RECORD") or "").splitlines()):
        path = Path(str(ours.locate_file(row[0])))
        if path.name in _THEIRS and not _is_ours(path):
            yield f"the command {path.name}"


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


def _source(ours: metadata.Distribution) -> str:
    """What pip is to install again: the folder it was installed from, else the name."""
    origin = json.loads(ours.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if not url.startswith("file://"):
        return url or _OURS
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return f"-e {url[7:]}" if is_editable else url[7:]
