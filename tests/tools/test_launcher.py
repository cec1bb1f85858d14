"""ts.launcher without a server; tests/integration/test_launcher.py starts servers."""

import re
import socket
import sys
import tempfile

import pytest

from marserve.tools import launcher

# The starter of a server that is killed before it listens, and leaves its pid file.
STARTER = f"""#!{sys.executable} -P
import os
import signal
from marserve.frontend.lifecycle.pidfile import PidFile

PidFile().claim()
server = os.fork()
if server == 0:
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(server, 0)
"""


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Write a configuration file of the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TS_CONFIG_FILE", raising=False)
    monkeypatch.setattr(launcher, "_config_file", None)
    return (tmp_path / "config.properties").write_text


def test_a_server_that_is_killed_before_it_listens_is_reported(configured, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    starter = tmp_path / "starter"
    starter.write_text(STARTER)
    starter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(starter))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        configured(f"inference_address=http://127.0.0.1:{unused.getsockname()[1]}\n")
        with pytest.raises(launcher.LauncherError, match="ended during its start"):
            launcher.start()
    assert (tmp_path / ".model_server.pid").exists()


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("", "http://127.0.0.1:8081"),
        ("management_address=http://0.0.0.0", "http://127.0.0.1:8081"),
        ("management_address=http\\://[\\:\\:]\\:99", "http://[::1]:99"),
        ("management_address=\\\n  http://$$PART$$:99", "http://models.example:99"),
    ],
)
def test_requests_go_to_the_address_that_the_server_reads(configured, monkeypatch, text, url):
    monkeypatch.setenv("PART", "models.example")
    configured(text)

    def refuse(*_args, **_more):
        raise ConnectionError("Refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(OSError, match=re.escape(f"Nothing answers at {url}: refused.")):
        launcher.register_model_with_params({"url": "m.mar"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("management_address=https://127.0.0.1:1", "supports plain http only"),
        ("management_address=unix:/tmp/socket", "supports plain http only"),
        ("management_address=127.0.0.1:1", "not known: http://host"),
    ],
)
def test_an_address_that_cannot_be_used(configured, text, words):
    configured(text)
    with pytest.raises(launcher.LauncherError, match=words):
        launcher.register_model("m", "m.mar")
