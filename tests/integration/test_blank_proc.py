"""Files of /proc and of control groups that are blank or cannot be read, as in some containers."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
        reason="mounts are not permitted here",
    ),
]

ECHO = "def handle(d, c):\n    return d and ['in'] * len(d)\n"
MEMORY, LOAD = "/proc/meminfo", "/proc/stat"
BLANK, UNREADABLE = "/dev/null", "/proc/self/mem"  # a read of the latter fails
# The mounts are seen by the server alone, and end with it.
MOUNTED = """#!/bin/sh
exec unshare -rm sh -c '
    for each in {files}; do mount --bind {instead} $each || exit; done
    {more}
    exec {program} "$@"' server "$@"
"""
HIDDEN_GROUPS = "mount -t tmpfs tmpfs /sys/fs/cgroup || exit"


@pytest.fixture
def make_own(prepare_server, make_archive, tmp_path):
    """Return a function that makes a server from whom files are hidden; all are closed."""

    def prepare(files, instead=BLANK, more="", **properties):
        server = opened.enter_context(prepare_server(load_models="echo.mar", **properties))
        make_archive(server.store, ECHO, "echo")
        program = tmp_path / "program"
        program.write_text(
            MOUNTED.format(
                files=" ".join(files), instead=instead, more=more, program=server.program
            )
        )
        program.chmod(0o755)
        server.program = program
        return server

    with contextlib.ExitStack() as opened:
        yield prepare


def host_in(server):
    """Return what the dashboard says of the host."""
    with server.management("GET", "/dashboard/events", stream=True) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: ") and b'"host"' in line:
                return json.loads(line[6:])["host"]
    raise AssertionError("there is no event of the host")


def served(server):
    """Assert that the server does all that it does; return the names of the host's metrics."""
    assert server.predict("echo", data=b"x").text == "in"
    assert server.management("PUT", "/models/echo?min_worker=2&synchronous=true").ok
    assert server.describe("echo")["workers"][0]["status"] == "READY"
    return {series.partition("{")[0] for series in server.metrics()}


@pytest.mark.parametrize("instead", [BLANK, UNREADABLE])
def test_a_server_starts_and_leaves_out_what_it_cannot_measure(make_own, wait_for, instead):
    server = make_own(
        [MEMORY, LOAD, "/proc/cpuinfo", "/proc/loadavg", "/proc/vmstat"],
        instead,
        HIDDEN_GROUPS,
        disable_system_metrics="false",
        metric_time_interval="1",
    )
    server.start()
    wait_for(lambda: "DiskUsage" in served(server))
    assert not {"MemoryUsed", "MemoryUtilization", "CPUUtilization"} & served(server)
    host = host_in(server)
    assert (host["memoryTotalBytes"], host["cpuPercent"]) == (None, None)
    text = server.console_text()
    assert text.count("The memory of the machine is unknown") == 1
    assert text.count("The load of the processors is unknown") == 1
    assert "Traceback" not in text
    server.stop()


def test_the_program_that_measures_the_host_prints_what_it_can(tmp_path):
    program = tmp_path / "program"
    command = f"{sys.executable} -m ts.metrics.metric_collector"
    program.write_text(
        MOUNTED.format(files=f"{MEMORY} {LOAD}", instead=BLANK, more="", program=command)
    )
    program.chmod(0o755)
    text = f"{os.getpid()}\n"
    done = subprocess.run([program], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *metrics, empty, memory = done.stdout.splitlines()
    assert {line.partition(".")[0] for line in metrics} == {
        "DiskAvailable",
        "DiskUsage",
        "DiskUtilization",
    }
    assert (empty, memory.partition(":")[0]) == ("", text.strip())
    assert "MemoryUsed is unknown" in done.stderr


@pytest.mark.parametrize("file", [MEMORY, LOAD])
def test_a_detached_server_without_system_metrics_starts_and_stops(make_own, file):
    server = make_own([file])

    def run(command):
        return subprocess.run(
            [server.program, command, "--ncs"],
            cwd=server.directory,
            env=server.environment,
            capture_output=True,
            text=True,
        )

    started = run("--start")
    assert "The server listens at" in started.stdout, started
    served(server)
    stopped = run("--stop")
    assert (stopped.returncode, stopped.stdout) == (0, "TorchServe has stopped.\n")


def test_figures_that_become_unknown_leave_the_metrics(make_own, wait_for):
    server = make_own(
        [], disable_system_metrics="false", metric_time_interval="1", metrics_mode="prometheus"
    )
    server.start()
    wait_for(lambda: {"MemoryUsed", "CPUUtilization"} <= served(server))
    for file in (MEMORY, LOAD):
        inside = ["nsenter", "-t", str(server.process.pid), "-U", "-m", "--preserve-credentials"]
        subprocess.run([*inside, "mount", "--bind", BLANK, file], check=True)
    wait_for(lambda: not {"MemoryUsed", "CPUUtilization"} & served(server))
    assert "DiskUsage" in served(server)
    server.stop()
