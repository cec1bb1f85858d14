"""``marserve ready``: wherever the server listens, and whatever it was started with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from servers import PATIENCE, Server, make_archive, wait_for

pytestmark = pytest.mark.integration

MARSERVE = Path(sys.executable).with_name("marserve")
FINE = "def handle(data, context):\n    return data and ['fine'] * len(data)\n"
BROKEN = "def handle(data, context):\n    raise RuntimeError('cannot load')\n"


def ask(server: Server, cwd: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [MARSERVE, "ready", *options],
        cwd=cwd,
        env=server.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture(name="started")
def starter(prepare_server, tmp_path):
    """Start a server, ask it from elsewhere until it is ready, and stop it."""

    def start(address, *arguments):
        with prepare_server() as server:
            make_archive(server.store, FINE, "fine")
            (server.directory / "own.properties").write_text(
                (server.directory / "config.properties").read_text()
                + f"inference_address={address.format(**server.ports)}\nload_models=fine.mar\n"
            )
            server.launch("--ts-config", "own.properties", *arguments)
            wait_for(lambda: ask(server, tmp_path).returncode == 0, what=server.console_text)
            assert json.loads(ask(server, tmp_path).stdout) == {"status": "Ready"}
            server.terminate()
            assert server.process is not None
            assert server.process.wait(PATIENCE) == 0

    return start


def test_over_http_at_all_addresses(started):
    started("http://0.0.0.0:{inference}", "--disable-token-auth")


def test_over_https_with_a_certificate_that_was_made_up(started):
    pytest.importorskip("cryptography")
    started("https://[::]:{inference}")  # with tokens: /ready asks for none


def test_over_a_unix_socket(started, tmp_path):
    started(f"unix:{tmp_path}/inference.sock")


def test_a_model_that_cannot_answer(prepare_server, tmp_path):
    with prepare_server(load_models="broken.mar") as server:
        make_archive(server.store, BROKEN, "broken")
        server.start()
        done = ask(server, tmp_path)
        assert done.returncode == 1
        assert json.loads(done.stdout) == {"status": "Not ready", "models": ["broken"]}


def test_no_server(prepare_server, tmp_path):
    with prepare_server() as server:
        done = ask(server, tmp_path)
    assert done.returncode == 1
    assert done.stdout == "The server cannot be checked: no server is running.\n"
