"""``--load``: handlers are loaded in processes of their own, with a limit."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from marserve.tools.doctor.main import main

GOOD = "def handle(data, context):\n    return data\n"
RAISES = "raise OSError('no weights here')\n\ndef handle(data, context): ...\n"
LEAVES_A_CHILD = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
with open({mark!r}, "w") as file:
    file.write(str(child.pid))

def handle(data, context): ...
"""


def load(folder: Path, *options: str) -> list[str]:
    return ["--load", str(folder), "--json", *options]


def findings(captured: str) -> dict[str, dict[str, Any]]:
    found = json.loads(captured)["findings"]
    return {each["file"]: each for each in found if each["rule"] == "handler-load"}


@pytest.mark.integration
def test_archives_are_loaded_and_what_they_say_is_told(make_archive, tmp_path, capsys):
    make_archive(tmp_path, GOOD, "good")
    make_archive(tmp_path, RAISES, "raises")
    assert main(load(tmp_path)) == 1
    found = findings(capsys.readouterr().out)
    assert found.keys() == {"raises.mar"}
    assert "OSError: no weights here" in found["raises.mar"]["what"]


def test_a_load_that_takes_too_long_is_ended(make_archive, tmp_path, capsys):
    make_archive(tmp_path, GOOD, "slow")
    assert main(load(tmp_path, "--load-timeout", "0.01")) == 1
    assert "took more than 0.01 s" in findings(capsys.readouterr().out)["slow.mar"]["what"]


@pytest.mark.integration
def test_what_a_handler_leaves_behind_is_ended(make_archive, tmp_path, capsys, wait_for):
    mark = tmp_path / "child"
    make_archive(tmp_path, LEAVES_A_CHILD.format(mark=str(mark)), "parent")
    assert main(load(tmp_path)) == 0
    assert findings(capsys.readouterr().out) == {}
    child = int(mark.read_text())
    wait_for(lambda: not is_running(child), what="a child of the handler goes on")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")  # noqa: PTH110
