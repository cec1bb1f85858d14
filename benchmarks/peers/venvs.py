"""One virtual environment per peer, below a cache directory: never in the repository.

``MARSERVE_PEERS`` names that directory; ``~/.cache/marserve-peers`` is the default. An environment
that is there already, made by hand or a link to one, is taken as it is.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

from contract import OWN_PYTHON, Peer

_DEFAULT = Path.home() / ".cache" / "marserve-peers"
_INSTALL_SECONDS = 1800.0
_VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def cache() -> Path:
    """Where the environments lie."""
    return Path(os.environ.get("MARSERVE_PEERS", _DEFAULT))


def python(peer: Peer, directory: Path) -> Path:
    """The interpreter that runs a peer; nobody has made it yet, perhaps."""
    if not peer.requirements:
        return OWN_PYTHON
    return directory / peer.distribution / "bin" / "python"


def install(peer: Peer, directory: Path) -> bool:
    """Make a peer's environment where it is missing or incomplete; whether it is there now."""
    if version(peer, directory):
        return True
    interpreter = python(peer, directory)
    print(f"installing {peer.name} into {interpreter.parents[1]} ...", file=sys.stderr, flush=True)
    venv.create(interpreter.parents[1], with_pip=True)
    # The wheels are large and needed once.
    command = [str(interpreter), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    try:
        subprocess.run([*command, *peer.requirements], check=True, timeout=_INSTALL_SECONDS)
    except subprocess.SubprocessError as error:
        print(f"{peer.name} cannot be installed: {error}", file=sys.stderr)
        return False
    return True


def version(peer: Peer, directory: Path) -> str:
    """The version of a peer, empty where it is not installed."""
    interpreter = python(peer, directory)
    if not interpreter.exists():
        return ""
    told = subprocess.run(
        [interpreter, "-c", _VERSION, peer.distribution],
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip()
