"""Virtual environments for programs that cannot be installed beside ours, each made once.

Some need an older protobuf than the tools of gRPC, others depend on TorchServe itself.
"""

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_BUILD = Path(__file__).parents[1] / "build"


def environment(
    name: str, *installs: Sequence[str], borrows: bool = False, cache: Path = _BUILD
) -> Path:
    """Return Python of an environment in which each of ``installs`` was given to ``pip install``.

    One that ``borrows`` finds packages that it lacks, such as torch, in the running environment.
    It is in ``cache`` and is made again when ``installs`` change. Of several test processes one
    makes it and the others wait. Where the registry cannot be reached, the test is skipped.
    """
    lenders = [each for each in sys.path if each.endswith("site-packages")] if borrows else []
    parts = (installs, sys.version_info[:2], *lenders)
    mark = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
    folder = cache / f"{name}-{mark}"
    python = folder / "bin" / "python"
    done = folder / "done"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _make(folder, python, installs)
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "lenders.pth").write_text("".join(f"{each}\n" for each in lenders))
            done.touch()
    return python


def _make(folder: Path, python: Path, installs: Sequence[Sequence[str]]) -> None:
    commands = [
        [sys.executable, "-m", "venv", "--clear", folder],
        *([python, "-m", "pip", "install", "--quiet", *words] for words in installs),
    ]
    for command in commands:
        made = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if made.returncode:
            pytest.skip(f"{folder.name} cannot be installed: {made.stderr[-500:]}")
