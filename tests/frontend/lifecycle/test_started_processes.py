"""The processes of a worker are found, or the search raises."""

import contextlib
import errno
import subprocess
import sys
import uuid
from types import SimpleNamespace

import psutil
import pytest

from marserve.frontend.lifecycle import started_processes
from marserve.frontend.lifecycle.started_processes import StartedProcesses

pytestmark = pytest.mark.integration

#: Overwrites its environment, as ``setproctitle`` does, and starts a process without a mark.
WORKER = """
import ctypes, subprocess, sys, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[47]), int(fields[48])
ctypes.memset(start, 0, end - start)
child = subprocess.Popen(["/bin/sleep", "1000"], env={}, start_new_session=True)
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def mark():
    return f"MARSERVE_TEST_WORKER={uuid.uuid4().hex}"


@pytest.fixture
def marked(mark):
    """A process with the mark."""
    environment = dict([mark.split("=")])
    with subprocess.Popen(["/bin/sleep", "1000"], env=environment) as process:
        yield process
        process.kill()


def test_a_worker_that_has_overwritten_its_environment_is_found_by_its_id(mark):
    processes = StartedProcesses()
    command = [sys.executable, "-c", WORKER]
    environment = dict([mark.split("=")])
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        both = {psutil.Process(worker.pid), psutil.Process(int(worker.stdout.readline()))}
        try:
            assert processes.find(mark) == set()
            assert processes.find(mark, [psutil.Process(worker.pid)]) == both
            assert processes.kill(mark, [psutil.Process(worker.pid)]) == 2
            assert processes.find(mark, both) == set()
        finally:
            for each in both:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def test_a_search_without_a_descriptor_fails_and_is_not_shared(mark, marked, monkeypatch):
    def fail(_pid):
        raise OSError(errno.EMFILE, "Too many open files")

    # The second search is requested while the first one runs.
    times = iter([1.0, 2.0, 1.5, 3.0])
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(started_processes, "time", clock)
    processes = StartedProcesses()
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "Process", fail)
        with pytest.raises(OSError, match="Too many open files"):
            processes.find(mark)
    assert {each.pid for each in processes.find(mark)} == {marked.pid}


def test_processes_that_do_not_end_are_logged(mark, marked, monkeypatch, caplog):
    monkeypatch.setattr(started_processes, "_KILL_SECONDS", 0.0)
    monkeypatch.setattr(psutil.Process, "kill", lambda _self: None)
    assert StartedProcesses().kill(mark) == 1
    assert f"Processes have not ended by SIGKILL within 5 s: [{marked.pid}]" in caplog.messages
