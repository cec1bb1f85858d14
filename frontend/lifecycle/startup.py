"""The log record of a start: environment and settings, and conflicts with TorchServe's packages.

TorchServe's packages install the same commands and import names as marserve, and pip overwrites
files without a warning. The last installation works until the other is uninstalled, which removes
its files.
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
# Packages, which are also names of commands.
_THEIRS = ("torchserve", "torch-model-archiver", "torch-workflow-archiver")
_PACKAGES = ("ts", "model_archiver", "workflow_archiver")


def banner(config: Config, *, gpus: int, cores: int, workdir: Path) -> str:
    """Return the environment, then every key of the configuration with its effective text.

    ``gpus`` and ``cores`` are numbers that the server uses; archives are unpacked in ``workdir``.
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
            is_pattern = key.name == "allowed_urls"  # its "?" does not start a query
            line = " ".join((text if is_pattern else without_secrets(text)).split())
            shortened = line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]}..."
            facts[key.name] = "***" if key.name in _SECRETS else shortened
    lines = [f"{name}: {value}" for name, value in facts.items()]
    return "\n".join([f"marserve {__version__} starts.", *lines])


def find_conflicts() -> str:
    """Return a sentence on files that another package has overwritten, or may; empty for none."""
    try:
        ours = metadata.distribution(_OURS)
        broken = [*_broken_commands(ours), *_broken_packages()]
        theirs = [name for name in _THEIRS if any(metadata.distributions(name=name))]
        source = _source(ours)
    except (ImportError, OSError, ValueError):
        return ""  # an installation of an unknown kind
    found = ""
    pip = f"{sys.executable} -m pip"
    install = f"{pip} install --force-reinstall --no-deps {source}"
    advice = f"To repair it: {install}"
    if broken:
        found = f"Another package has overwritten or removed {', '.join(broken)} of marserve. "
    if theirs:
        names = " and ".join(theirs)
        found += (
            f"TorchServe's {names} beside marserve: files of the same names overwrite each other. "
        )
        uninstall = f"{pip} uninstall -y {' '.join(theirs)}"
        advice = f"To repair it, in this order: {uninstall}; {install}"
    return found and found + advice


def _broken_commands(ours: metadata.Distribution) -> Iterator[str]:
    # Not `ours.files`, which omits missing files since Python 3.12.
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
    """Whether a file is marserve's: each of them contains its name."""
    try:
        return _OURS in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _source(ours: metadata.Distribution) -> str:
    """Return what pip installs again: the source folder, or the name of the package."""
    origin = json.loads(ours.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if not url.startswith("file://"):
        return url or _OURS
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return f"-e {url[7:]}" if is_editable else url[7:]
