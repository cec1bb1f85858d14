"""A test run that is interrupted or killed."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from servers import wait_for

TESTS = Path(__file__).parent
OPTIONS = ("-c", TESTS.parent / "setup.cfg", "-p", "conftest", "-p", "no:cacheprovider")
MODULE = """
import subprocess, time
from pathlib import Path

def test_with_a_process():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    path = Path(__file__).with_name("pid")
    path.with_suffix(".new").write_text(str(child.pid))
    path.with_suffix(".new").rename(path)
    time.sleep(1000)
"""


@pytest.fixture
def run(tmp_path):
    """Start a run as ``&`` of a shell does, and wait until its test has started a process."""

    with ExitStack() as runs:

        def run():
            module = tmp_path / "test_slow.py"
            module.write_text(MODULE)
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *OPTIONS, module],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(TESTS)},
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            )
            runs.enter_context(process)
            runs.callback(process.kill)
            wait_for((tmp_path / "pid").exists, what="the test does not start")
            return process, psutil.Process(int((tmp_path / "pid").read_text()))

        yield run


def test_a_killed_run_leaves_no_process(run):
    process, child = run()
    process.kill()
    wait_for(lambda: not child.is_running() or child.status() == "zombie")


def test_an_interrupted_run_prints_its_summary(run):
    process, child = run()
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in printed
    assert "no tests ran in" in printed.splitlines()[-1]
    wait_for(lambda: not child.is_running() or child.status() == "zombie")
