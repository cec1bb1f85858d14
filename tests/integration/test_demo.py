"""examples/resnet152: the demo runs, and says clearly why where it cannot."""

import socket
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from servers import Gate, held_import

pytestmark = pytest.mark.integration

DEMO = Path(__file__).resolve().parents[2] / "examples" / "resnet152" / "demo.py"


def run_demo(
    server: Any, *arguments: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """The demo on the addresses of a prepared server, which it starts itself."""
    options = ["--config", server.directory / "config.properties", "--build-dir", server.directory]
    logs = {name: str(server.directory / "logs") for name in ("LOG_LOCATION", "METRICS_LOCATION")}
    return subprocess.run(
        [sys.executable, DEMO, "--once", "--random-weights", *options, *arguments],
        env={**server.environment, **logs, **environment},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_everything_it_prints_is_true(prepare_server, tmp_path):
    # torch makes this folder when torchvision is imported; left to itself, in the server's TMPDIR.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    with prepare_server(environment=cache, preload_modules="torch") as server:
        done = run_demo(server)
        assert done.returncode == 0, done.stdout + done.stderr
        server.assert_nothing_left()
    commands = [line for line in done.stdout.splitlines() if line.startswith("$ ")]
    programs = [command.split()[1] for command in commands]
    assert programs[:3] == ["torch-model-archiver", "torchserve", "curl"]
    assert programs[-1] == "kill"
    assert "these classes mean nothing" in done.stdout
    assert "they travelled together" in done.stdout
    management = f"http://127.0.0.1:{server.ports['management']}"
    assert f"\nDashboard: {management}/dashboard\n\n$ kill " in done.stdout


def test_a_taken_port_is_named(prepare_server):
    with prepare_server() as server, socket.socket() as neighbour:
        address = ("127.0.0.1", server.ports["management"])
        neighbour.bind(address)
        neighbour.listen()
        done = run_demo(server)
    assert done.returncode == 1
    assert "Failed: Cannot listen on {}:{}".format(*address) in done.stdout


def test_a_running_server_is_left_alone(prepare_server):
    with prepare_server() as server:
        server.start()
        done = run_demo(server)
        assert server.is_running
        server.stop()
    assert done.returncode == 1
    assert "Failed: A server is already running (pid" in done.stdout


def test_a_server_that_started_while_it_packed_is_left_alone(prepare_server, tmp_path):
    gate = Gate(tmp_path / "gate")
    environment = {**held_import(tmp_path, "torch", gate), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    with prepare_server() as server, ThreadPoolExecutor() as threads:
        demo = threads.submit(run_demo, server, **environment)
        gate.wait_entered()
        server.start()
        gate.open_for_all()
        done = demo.result()
        assert server.is_running
        assert not server.is_known("resnet-152")
        server.stop()
    assert done.returncode == 1
    assert "Failed: The server ended at once. Its output:\nTorchServe is already running" in (
        done.stdout
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"disable_token_authorization": "false"}, "without a token"),
        ({"enable_model_api": "false"}, "this configuration forbids it"),
        ({"enable_metrics_api": "false"}, "needs the metrics listener"),
    ],
)
def test_settings_it_cannot_work_with(prepare_server, settings, sentence):
    with prepare_server(**settings) as server:
        done = run_demo(server)
    assert done.returncode == 1
    assert sentence in done.stdout


def test_a_strangers_archive_is_not_overwritten(prepare_server):
    with prepare_server() as server:
        archive = server.store / "resnet-152.mar"
        with zipfile.ZipFile(archive, "w") as members:
            members.writestr("model.py", "")
        before = archive.read_bytes()
        done = run_demo(server)
        assert archive.read_bytes() == before
    assert done.returncode == 1
    assert "was not packed by this demo" in done.stdout
