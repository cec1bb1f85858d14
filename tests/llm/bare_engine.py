"""The engine of a model without the server around it, for comparisons."""

import http.client
import socket
from contextlib import closing
from typing import NamedTuple

import psutil
from servers import Server, wait_for

START_SECONDS = 300.0


class Answer(NamedTuple):
    """An answer of the engine."""

    status: int
    content_type: str
    body: bytes


class BareEngine:
    """The server of an engine, a child process of a model's only worker."""

    def __init__(self, server: Server, model: str) -> None:
        worker = psutil.Process(server.worker(model)["pid"])
        (self.process,) = [each for each in worker.children() if "--uds" in each.cmdline()]
        words = self.process.cmdline()
        self.socket = words[words.index("--uds") + 1]

    def request(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Send a request to the engine itself."""
        with closing(_UnixConnection(self.socket)) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return Answer(answer.status, answer.getheader("content-type", ""), answer.read())

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of the samples of a metric that have a label, such as ``reason="x"``."""
        lines = self.request("GET", "/metrics").body.decode().splitlines()
        found = [line for line in lines if line.startswith(f"{name}{{") and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def wait_ready(server: Server, model: str) -> None:
    """Wait until the only worker of a model is ready, and its engine with it."""
    wait_for(
        lambda: [each["status"] for each in server.describe(model)["workers"]] == ["READY"],
        START_SECONDS,
        what=lambda: server.log("model_log.log")[-3000:],
    )


def descendants(server: Server) -> list[psutil.Process]:
    """Return the processes below a server; those of vLLM overwrite the mark of the server."""
    assert server.process is not None
    return psutil.Process(server.process.pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
