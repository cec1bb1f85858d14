"""Real processes: how a runner ends whose children did."""

import subprocess
import sys

import pytest

PROGRAM = """
import subprocess, sys
from marserve.backend.processes.runner import FirstFailure

failure = FirstFailure()
children = [subprocess.Popen([sys.executable, "-c", code]) for code in sys.argv[1:]]
for thread in [failure.watch(child.pid) for child in children]:
    thread.join()
for child in children:
    child.wait()
failure.exit_alike()
print("all are well")
"""
SLOW = "import time; time.sleep(0.3); raise SystemExit(9)"
KILLED = "import os; os.kill(os.getpid(), {})"


@pytest.mark.parametrize(
    ("children", "status"),
    [
        (["pass", "pass"], 0),
        (["pass", "raise SystemExit(3)"], 3),
        ([SLOW, "raise SystemExit(3)"], 3),
        ([SLOW, KILLED.format(11)], -11),
        ([SLOW, KILLED.format(9)], -9),
        (["raise SystemExit(4)", KILLED.format(15)], 4),
    ],
)
def test_a_runner_ends_as_the_first_of_its_processes_did(children, status):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *children], capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    assert ("all are well" in done.stdout) == (status == 0)
