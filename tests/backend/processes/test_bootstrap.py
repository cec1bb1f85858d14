import os
import subprocess
import sys
from pathlib import Path

import pytest

from marserve.backend.processes.bootstrap import Runner, WorkerConfig, as_program, command, probe

TRAPS = ("json", "socket", "runpy", "marserve")


@pytest.fixture
def trapped(tmp_path):
    """A directory whose modules end whoever imports them."""
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the model')\n")
    return tmp_path


def run(arguments: list[str], cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("runner", [None, Runner("torch.distributed.run", ("--a", "b"), 2, True)])
def test_a_config_survives_the_command_line(runner):
    config = WorkerConfig(
        sock=7,
        python_path=("/a b", "/c"),
        model_dir="/m",
        threads=2,
        environment={"PYTHONPATH": "/é"},
        runner=runner,
    )
    python, dash_c, _, text = command("/usr/bin/python", config)
    assert (python, dash_c) == ("/usr/bin/python", "-c")
    assert WorkerConfig.from_text(text) == config


def test_an_interpreter_that_has_marserve_passes_the_probe_wherever_it_runs(trapped):
    done = run(probe(sys.executable), trapped)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interpreter_without_marserve_fails_the_probe_with_its_reason(tmp_path):
    python, *arguments = probe(sys.executable)
    done = run([python, "-I", "-S", *arguments], tmp_path)  # without site-packages
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr.splitlines()[-1]


def test_a_module_runs_as_a_program_with_nothing_from_the_working_directory(trapped):
    (trapped / "elsewhere").mkdir()
    (trapped / "elsewhere" / "shown.py").write_text(
        "import json, sys\nprint(__name__, json.dumps(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, *as_program("shown", "a", "b c")],
        cwd=trapped,
        env={**os.environ, "PYTHONPATH": str(trapped / "elsewhere")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == '__main__ ["a", "b c"]\n', done.stderr
