"""``marserve demo``: it serves a model that it has trained, and what it prints can be used."""

import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from servers import Gate, held_import, wait_for

pytestmark = pytest.mark.integration


def start_demo(server: Any, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """The demo on the addresses of a prepared server, which it starts itself."""
    config = str(server.directory / "config.properties")
    return subprocess.Popen(
        [Path(sys.executable).with_name("marserve"), "demo", "--ts-config", config, *arguments],
        env={**server.environment, **environment},
        cwd=server.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_demo(server: Any, **environment: str) -> tuple[int, str]:
    """Exit status and output of the demo that stops its server."""
    demo = start_demo(server, "--once", **environment)
    output, _ = demo.communicate(timeout=170)
    return demo.returncode, output


def test_it_serves_until_it_is_interrupted(prepare_server):
    with prepare_server() as server:
        demo = start_demo(server)
        assert demo.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("Dashboard: "):
            line = demo.stdout.readline()
            assert line, lines
            lines.append(line.strip())
        (share,) = (line for line in lines if line.startswith("Served 360 digits"))
        assert float(share.split()[-3].rstrip("%")) > 95
        management = f"http://127.0.0.1:{server.ports['management']}"
        assert lines[-1] == f"Dashboard: {management}/dashboard"
        assert server.describe("digits")["workers"][0]["status"] == "READY"
        predict, describe = (line for line in lines if line.startswith("curl "))
        for command in (predict, describe):
            done = subprocess.run(
                [*shlex.split(command), "--fail", "--silent", "--noproxy", "*"],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        refused = server.predict("digits", json={"no": "image"})
        assert (refused.status_code, refused.json()["error"][:13]) == (400, "Send 8 lists ")
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
        demo.stdout.close()
        server.assert_nothing_left()
        assert not list(server.temp.glob("marserve-demo-*"))


def test_with_keys_it_names_their_file(prepare_server):
    with prepare_server(disable_token_authorization="false") as server:
        status, output = run_demo(server)
        assert status == 0, output
        server.assert_nothing_left()
    assert f"The keys are in {server.directory / 'key_file.json'}." in output
    assert output.splitlines()[-1].endswith("/dashboard")


def test_a_taken_port_is_named(prepare_server):
    with prepare_server() as server, socket.socket() as neighbour:
        address = ("127.0.0.1", server.ports["management"])
        neighbour.bind(address)
        neighbour.listen()
        status, output = run_demo(server)
    assert status == 1
    assert "Failed: The server did not start: Cannot listen at http://{}:{}".format(*address) in (
        output
    )


def test_a_running_server_is_left_alone(prepare_server):
    with prepare_server() as server:
        server.start()
        status, output = run_demo(server)
        assert server.is_running
        server.stop()
    assert status == 1
    assert "Failed: A server is already running (pid" in output


def test_a_server_that_started_while_it_trained_is_left_alone(prepare_server, tmp_path):
    gate = Gate(tmp_path / "gate")
    with prepare_server() as server:
        demo = start_demo(server, **held_import(tmp_path, "threadpoolctl", gate))
        gate.wait_entered()
        server.start()
        gate.open_for_all()
        output, _ = demo.communicate(timeout=60)
        assert server.is_running
        assert server.process is not None
        assert demo.returncode == 1
        failed, whose, hint = output.splitlines()[-3:]
        assert failed.startswith("Failed: The server did not start: TorchServe is already running")
        assert whose.startswith(f"It has pid {server.process.pid}, directory {server.directory}")
        assert hint.startswith("A second server needs another TMPDIR")
        server.stop()


def test_a_server_that_took_the_place_of_its_own_is_left_alone(prepare_server):
    with prepare_server() as server:
        demo = start_demo(server)
        assert demo.stdout is not None
        while not (line := demo.stdout.readline()).startswith("Dashboard: "):
            assert line
        demo.send_signal(signal.SIGSTOP)
        pid = int((server.temp / ".model_server.pid").read_text())
        psutil.Process(pid).kill()
        wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
        server.start()
        demo.send_signal(signal.SIGCONT)
        output, _ = demo.communicate(timeout=60)
        assert (demo.returncode, output) == (1, "Failed: The server has ended by itself.\n")
        assert server.is_running


def test_a_missing_package_is_named(prepare_server, tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError(name='sklearn')\n")
    with prepare_server() as server:
        status, output = run_demo(server, PYTHONPATH=str(tmp_path))
    assert (status, output) == (1, "Failed: sklearn is not installed: pip install scikit-learn\n")
