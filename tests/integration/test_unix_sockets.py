"""Listeners that are sockets in the file system."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import stat
import subprocess

import pytest

pytestmark = pytest.mark.integration


class UnixConnection(http.client.HTTPConnection):
    """An HTTP client of a socket file."""

    def __init__(self, path):
        super().__init__("localhost", timeout=20)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def ask(path, method, target, body=None, headers=None):
    """Status and body of an answer."""
    connection = UnixConnection(path)
    try:
        connection.request(method, target, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture
def prepare(prepare_server):
    """Prepare a server whose listeners are socket files named i, m and x in its directory."""

    def make(stack, **names):
        names = {"inference": "i", "management": "m", "metrics": "x", **names}
        server = stack.enter_context(prepare_server())
        for listener, name in names.items():
            server.write_property(f"{listener}_address", f"unix:{server.directory / name}")
        return server

    return make


@pytest.fixture
def stack():
    with contextlib.ExitStack() as opened:
        yield opened


def start(server, wait_for):
    message = "Model server started."
    before = server.console_text().count(message)
    server.launch()
    wait_for(
        lambda: server.console_text().count(message) > before or not server.is_running,
        what=server.console_text,
    )
    assert server.is_running, server.console_text()
    return server


def test_a_whole_life(prepare, stack, make_archive, wait_for):
    server = start(prepare(stack), wait_for)
    inference, management = server.directory / "i", server.directory / "m"
    for name, path in (("Inference", "i"), ("Management", "m"), ("Metrics", "x")):
        server.wait_printed(f"{name} API bind to: unix:{server.directory / path}\n")
    assert json.loads(ask(inference, "GET", "/ping")[1]) == {"status": "Healthy"}
    # Nobody but this machine gets here: no tokens, models may be registered, any Host is fine.
    make_archive(server.store, "def handle(d, c):\n    return d and ['in'] * len(d)\n", "m")
    target = "/models?url=m.mar&initial_workers=1"
    headers = {"Host": "some-proxy", "Origin": "http://some-page"}
    assert ask(management, "POST", target, headers=headers)[0] == 200
    assert ask(inference, "POST", "/predictions/m", b"x") == (200, b"in")
    assert b"ts_inference_requests_total" in ask(server.directory / "x", "GET", "/metrics")[1]
    server.wait_logged("access_log.log", f'/unix:pid={os.getpid()},uid={os.getuid()} "POST /pred')
    if curl := shutil.which("curl"):
        command = [curl, "-s", "--max-time", "20", "--unix-socket", management]
        listed = subprocess.run([*command, "http://any/models"], capture_output=True, check=True)
        assert json.loads(listed.stdout)["models"][0]["modelName"] == "m"
    server.stop()
    assert not [path for path in server.directory.iterdir() if path.is_socket()]


def test_equal_paths_share_a_listener(prepare, stack, wait_for):
    server = start(prepare(stack, management="i"), wait_for)
    shared = server.directory / "i"
    assert f"Inference and Management and Metrics API bind to: unix:{shared}" in (
        server.console_text()
    )
    for target in ("/ping", "/models", "/metrics"):
        assert ask(shared, "GET", target)[0] == 200
    assert ask(server.directory / "x", "GET", "/metrics")[0] == 200


def test_the_umask_says_who_may_connect(prepare, stack, wait_for):
    server = prepare(stack)
    before = os.umask(0o027)
    try:
        start(server, wait_for)
    finally:
        os.umask(before)
    assert stat.S_IMODE((server.directory / "i").stat().st_mode) == 0o750


def test_what_a_dead_server_left_is_replaced(prepare, stack, wait_for):
    server = start(prepare(stack), wait_for)
    server.process.kill()
    server.process.wait()
    assert (server.directory / "i").is_socket()
    start(server, wait_for)
    assert ask(server.directory / "i", "GET", "/ping")[0] == 200


def test_a_path_that_is_taken_is_left_alone(prepare, stack, wait_for):
    server = start(prepare(stack), wait_for)
    path = server.directory / "i"
    rival = prepare(stack)
    rival.write_property("inference_address", f"unix:{path}")
    assert rival.launch().wait(20) == 1
    sentence = f"Cannot listen at unix:{path}: another server listens there"
    rival.wait_printed(f"The server cannot continue: {sentence}\n")
    rival.assert_nothing_left()
    assert ask(path, "GET", "/ping")[0] == 200


def test_what_is_no_socket_is_never_removed(prepare, stack):
    server = prepare(stack)
    (server.directory / "i").write_text("precious")
    assert server.launch().wait(20) == 1
    server.wait_printed(f"unix:{server.directory / 'i'}: the file is not a socket")
    assert (server.directory / "i").read_text() == "precious"


def test_a_successors_socket_survives_the_end_of_its_predecessor(prepare, stack, wait_for):
    server = start(prepare(stack), wait_for)
    path = server.directory / "i"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(path))
        server.stop(signal.SIGTERM)
        assert path.is_socket()
