import asyncio
import contextlib
import os
from pathlib import Path

import psutil
import pytest
import uvloop

from marserve.frontend.telemetry.system import Output, run_command


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run_loop(request):
    """The loop of the standard library, and the one the server runs on."""
    return request.param


@pytest.fixture
def run(run_loop):
    def run_script(script, stdin="", timeout=20.0):
        command = run_command(["/bin/sh", "-c", script], stdin=stdin, timeout=timeout)
        return run_loop(command)

    return run_script


def wait_gone(pid_file: Path) -> None:
    """Wait for the end of a process that has been killed; an orphan may stay unburied."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(pid_file.read_text()))
        while process.status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()


def test_input_and_outputs(run):
    output = run("read line; echo got $line; echo bad >&2", "1,2\n")
    assert output == Output("got 1,2\n", "bad\n", True)


def test_what_does_not_read_is_no_harm(run):
    assert run("exec <&-; echo fine", "x" * 1_000_000).stdout == "fine\n"


@pytest.mark.parametrize("script", ["sleep 60 & echo $! > {}; wait", "sleep 60 & echo $! > {}"])
def test_what_hangs_is_killed_with_its_children(script, run, tmp_path):
    pid_file = tmp_path / "pid"
    output = run(script.format(pid_file), timeout=0.3)
    assert not output.is_complete
    wait_gone(pid_file)


@pytest.mark.parametrize("to", ["", ">&2"])
def test_what_writes_without_end_is_killed(to, run):
    output = run(f"yes {to}", timeout=20.0)
    assert not output.is_complete
    assert len(output.stdout) + len(output.stderr) == 1 << 20


def test_whoever_stops_waiting_ends_it(run_loop, tmp_path):
    pid_file, gate = tmp_path / "pid", tmp_path / "gate"
    os.mkfifo(gate)

    async def scenario():
        script = f"echo $$ > {pid_file}; echo > {gate}; exec sleep 60"
        task = asyncio.create_task(run_command(["/bin/sh", "-c", script], timeout=60.0))
        await asyncio.to_thread(gate.read_text)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_loop(scenario())
    wait_gone(pid_file)


def test_what_is_not_there_cannot_be_run():
    with pytest.raises(OSError, match="no-such"):
        asyncio.run(run_command(["/no-such"], timeout=1.0))
