"""Programs that are no Python packages: `apt-packages.txt` names Debian's packages of them."""

import os
import shutil

import pytest

REQUIRED = "MARSERVE_TEST_PROGRAMS"


def program(name: str) -> str:
    """The path of a program; without it the test is skipped, or fails where CI says "required"."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    if path is None:
        reason = f"{name} is not installed; see tests/apt-packages.txt"
        (pytest.fail if os.environ.get(REQUIRED) == "required" else pytest.skip)(reason)
    return path
