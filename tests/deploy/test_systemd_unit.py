"""The unit file, read by systemd's own programs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from deploy.container import ROOT
from programs import program

from marserve.frontend.configuration.config import Config
from marserve.frontend.lifecycle.daemon import FORCED_END_SECONDS

UNIT = ROOT / "deploy" / "systemd" / "marserve.service"


def analyze(*arguments: str | Path) -> str:
    command = [program("systemd-analyze"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def unit(tmp_path):
    """The unit, with a program that is installed here."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/marserve/bin", str(Path(sys.executable).parent)))
    return path


def test_it_is_understood(unit):
    assert "marserve" not in analyze("verify", unit)  # it names the unit in each complaint


def test_it_is_as_closed_as_the_page_says(unit):
    report = analyze("security", "--offline=true", unit)
    found = re.search(r"exposure level for marserve.service: ([\d.]+)", report)
    assert found, report
    page = (ROOT / "docs" / "platforms" / "systemd.md").read_text()
    assert f"rates the unit {found[1]} " in page


def test_it_waits_for_as_long_as_a_stop_may_take():
    found = re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert found
    assert int(found[1]) > Config(model_store=Path()).stop_seconds + FORCED_END_SECONDS
