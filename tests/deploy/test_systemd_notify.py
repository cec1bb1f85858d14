"""A real server tells of itself as systemd's services of type notify do."""

import contextlib
import os
import signal
import socket
import subprocess
import uuid

import pytest
from servers import PATIENCE, TORCHSERVE, is_open, wait_for

pytestmark = pytest.mark.integration


class Listener:
    """The end of systemd; `messages` are those that came so far, watchdog's left out."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.messages: list[dict[str, str]] = []

    def next(self, seconds: float = PATIENCE) -> dict[str, str]:
        self._listener.settimeout(seconds)
        lines = self._listener.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def wait(self, key: str) -> dict[str, str]:
        while key not in (message := self.next()):
            pass
        return message


@pytest.fixture
def listener(monkeypatch):
    name = f"marserve-test-{uuid.uuid4().hex}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(f"\0{name}")
        yield Listener(bound)


def test_its_life_is_told(listener, prepare_server, handlers, monkeypatch):
    with prepare_server(drain_timeout="7", lame_duck_seconds="0.5") as server:
        server.launch()
        assert server.process is not None
        assert listener.next() == {"MAINPID": str(server.process.pid)}
        inference = server.ports["inference"]
        ready = listener.next()
        assert ready == {"READY": "1", "STATUS": f"Listens at http://127.0.0.1:{inference}"}
        assert all(map(is_open, server.ports.values()))
        server.install(handlers / "lab.py", "lab")
        # What it has started shall not speak for it.
        started = [each for each in server.processes() if each.pid != server.process.pid]
        assert started
        assert not any("NOTIFY_SOCKET" in each.environ() for each in started)
        server.terminate()
        stopping = listener.next()
        assert stopping["STOPPING"] == "1"
        # lame_duck_seconds, drain_timeout, stop_grace, and the end by force
        assert stopping["EXTEND_TIMEOUT_USEC"] == str(int((0.5 + 7 + 20 + 10) * 1e6))
        server.wait_stopped()


def test_a_detached_server_takes_the_place_of_its_starter(listener, prepare_server, monkeypatch):
    # Meant for the starter alone, and the server is another process.
    monkeypatch.setenv("WATCHDOG_USEC", "50000")
    with prepare_server() as server:
        done = subprocess.run(
            ["/bin/sh", "-c", 'WATCHDOG_PID=$$ exec "$0" --start --ncs', TORCHSERVE],
            cwd=server.directory,
            env=server.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=30,
        )
        assert done.returncode == 0
        pid = int((server.temp / ".model_server.pid").read_text())
        assert listener.next() == {"MAINPID": str(pid)}
        listener.wait("READY")
        listener.wait("WATCHDOG")
        os.kill(pid, signal.SIGTERM)
        listener.wait("STOPPING")
        wait_for(lambda: not server.processes())


def test_a_server_that_hangs_is_not_heard_of(listener, prepare_server, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    with prepare_server() as server:
        server.start()
        listener.wait("WATCHDOG")
        server.terminate(signal.SIGSTOP)
        with contextlib.suppress(TimeoutError):
            while True:  # what it had sent before
                listener.next(0.01)
        with pytest.raises(TimeoutError):
            listener.next(0.4)
        server.terminate(signal.SIGCONT)
        listener.wait("WATCHDOG")
        # What systemd does then, and what the journal gets to see of it.
        server.terminate(signal.SIGABRT)
        assert server.process.wait(PATIENCE) == -signal.SIGABRT
        server.wait_printed("Fatal Python error: Aborted")
