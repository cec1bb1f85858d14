import json
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

import pytest

from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.lifecycle.startup import banner, find_conflicts

# -- the banner ------------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.setenv("LOG_LOCATION", "elsewhere")
    monkeypatch.chdir(tmp_path)
    Path("c").write_text(
        "model_store=.\nkeystore_pass=hidden\njob_queue_size=7\nmodels={\\n}\nload_models=all\n"
    )
    config = load_config({"load_models": "a.mar"}, "c", {})
    text = banner(config, gpus=2, cores=3, workdir=Path("/w"))
    return dict(line.partition(": ")[::2] for line in text.splitlines())


def test_surroundings_and_what_is_in_force(lines, tmp_path):
    assert lines["Number of GPUs"] == "2"
    assert lines["Number of CPUs"] == "3"
    assert lines["Temp directory"] == "/w"
    assert lines["Current directory"] == str(tmp_path)
    assert lines["Log dir"] == str(tmp_path / "elsewhere")
    assert lines["Model API enabled"] == "true"
    assert lines["job_queue_size"] == "7"
    assert lines["load_models"] == "a.mar"
    assert lines["model_store"] == str(tmp_path)
    assert lines["models"] == "{ }"


def test_every_key_with_a_value_stands_in_it_and_no_secret(lines):
    assert {key.name for key in KEYS.values() if key.default is not None} <= lines.keys()
    assert lines["keystore_pass"] == "***"
    assert "hidden" not in str(lines)


# -- the installation ------------------------------------------------------------------------------

PIP = f"{sys.executable} -m pip"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory of packages, and the only one that is looked at."""
    site = tmp_path / "lib" / "site"
    site.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.setattr(sys, "meta_path", [BuiltinImporter, FrozenImporter, PathFinder])
    for name in ("ts", "model_archiver", "workflow_archiver"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return site


@pytest.fixture
def install(site):
    """Does what pip does: writes files, over those of others, and notes them."""

    def install(name, files, origin=None):
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        for file in files:
            path = site / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# a file of {name}")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        if origin:
            (info / "direct_url.json").write_text(json.dumps(origin))

    return install


COMMANDS = [
    "../../bin/torchserve",
    "../../bin/torch-model-archiver",
    "../../bin/torch-workflow-archiver",
]
NAMES = ("ts", "model_archiver", "workflow_archiver")
OURS = ["../../bin/marserve", *COMMANDS, *(f"{name}/__init__.py" for name in NAMES)]


def test_alone_all_is_well(install):
    install("marserve", OURS)
    assert find_conflicts() == ""


def test_torchserve_installed_later(install):
    install("marserve", OURS)
    install("torchserve", [COMMANDS[0], "ts/__init__.py"])
    advice = find_conflicts()
    assert "overwritten or removed the command torchserve, the import name ts of marserve" in advice
    assert (
        f": {PIP} uninstall -y torchserve; {PIP} install --force-reinstall --no-deps marserve"
        in advice
    )


def test_marserve_installed_over_torchserve(install):
    install("torchserve", [COMMANDS[0], "ts/__init__.py"])
    install("torch-model-archiver", [COMMANDS[1], "model_archiver/__init__.py"])
    origin = {"url": "file:///home/me/marserve", "dir_info": {"editable": True}}
    install("marserve", OURS, origin)
    advice = find_conflicts()
    assert "overwritten" not in advice
    assert f"uninstall -y torchserve torch-model-archiver; {PIP} install" in advice
    assert advice.endswith(" --no-deps -e /home/me/marserve")


def test_torchserve_uninstalled_too_late(install, site):
    install("marserve", OURS, {"url": "file:///home/me/marserve", "dir_info": {}})
    (site / COMMANDS[0]).unlink()
    (site / "ts" / "__init__.py").unlink()
    advice = find_conflicts()
    assert "the command torchserve, the import name ts of marserve" in advice
    assert advice.endswith(
        f"To repair it: {PIP} install --force-reinstall --no-deps /home/me/marserve"
    )


def test_an_installation_that_cannot_be_judged(install, site):
    assert find_conflicts() == ""
    install("marserve", OURS)
    (site / "ts" / "__init__.py").unlink()
    (site / "marserve-1.0.dist-info" / "direct_url.json").write_text("{")
    assert find_conflicts() == ""
