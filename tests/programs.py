"""Programs of the system; `apt-packages.txt` names their Debian packages."""

import os
import shutil

import pytest

REQUIRED = "MARSERVE_TEST_PROGRAMS"


def program(name: str) -> str:
    """Return the path of a program; without it the test is skipped, or fails if CI requires it."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    if path is None:
        reason = f"{name} is not installed; see tests/apt-packages.txt"
        (pytest.fail if os.environ.get(REQUIRED) == "required" else pytest.skip)(reason)
    return path
