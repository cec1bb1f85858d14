"""Servers as child processes, in a directory of their own and gone at the end."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_READY_SECONDS = 30.0
_STOP_SECONDS = 40.0
_MANAGE_SECONDS = 1300.0  # a model that is registered may be compiled first
_POLL_SECONDS = 0.005


class Marserve:
    """A marserve that runs on free ports; nothing but ports and model store is configured.

    Args:
        directory: An empty directory; the model store is ``store`` in it.

    Attributes:
        inference_port: Where it answers.
        seconds_to_ping: From the start of its process to the first 200 of /ping.
        pid: Its process id.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.inference_port, self._management_port, self._metrics_port = free_ports(3)
        self.seconds_to_ping = 0.0
        self.pid = 0

    @contextmanager
    def running(self) -> Iterator["Marserve"]:
        """Start it, wait until it answers /ping, and stop it at the end."""
        self._configure()
        command = [str(Path(sys.executable).with_name("marserve")), "--foreground", "--ncs"]
        # The pid file lies in TMPDIR, and there may be other servers.
        environment = {**os.environ, "TMPDIR": str(self.directory)}
        with Path(self.directory, "console.log").open("wb") as console:
            started = time.perf_counter()
            process = subprocess.Popen(
                command, cwd=self.directory, env=environment, stdout=console, stderr=console
            )
            with _ended_at_last(process):
                self.pid = process.pid
                self._knock(process, self.inference_port, "/ping")
                self.seconds_to_ping = time.perf_counter() - started
                # The listeners open one after the other.
                self._knock(process, self._management_port, "/models")
                self._knock(process, self._metrics_port, "/metrics")
                yield self

    @contextmanager
    def model(self, url: str, **parameters: str | int) -> Iterator[None]:
        """Register a model, with one worker if nothing is said, and unregister it at the end."""
        wanted = {"initial_workers": 1, "synchronous": "true", **parameters}
        query = "&".join(f"{key}={value}" for key, value in wanted.items())
        self.manage("POST", f"/models?url={url}&{query}")
        try:
            yield
        finally:
            self.manage("DELETE", f"/models/{url.partition('.')[0]}")

    def manage(self, method: str, target: str) -> str:
        """Call the management API.

        Raises:
            RuntimeError: It answered with an error, whose text this is.
        """
        return _fetch(self._management_port, target, method, timeout=_MANAGE_SECONDS)

    def predict(self, path: str, body: bytes) -> str:
        """Post one request for a prediction.

        Raises:
            RuntimeError: It was answered with an error, whose text this is.
        """
        return _fetch(self.inference_port, path, "POST", timeout=120, body=body)

    def loads(self) -> list[float]:
        """The seconds each model load took, as the workers said, the oldest first."""
        log = Path(self.directory, "logs", "model_log.log").read_text(encoding="utf-8")
        return [float(seconds) for seconds in re.findall(r"Model \S+ loaded in ([\d.]+) s", log)]

    def counted(self, metric: str) -> float:
        """The sum of the values of a metric over its labels."""
        text = _fetch(self._metrics_port, "/metrics", "GET", timeout=10)
        values = re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    def _configure(self) -> None:
        Path(self.directory, "store").mkdir(exist_ok=True)
        lines = [
            f"{name}_address=http://127.0.0.1:{port}"
            for name, port in (
                ("inference", self.inference_port),
                ("management", self._management_port),
                ("metrics", self._metrics_port),
            )
        ]
        # No other server must find its ports taken.
        lines += ["grpc_inference_port=0", "grpc_management_port=0"]
        text = "\n".join([*lines, "model_store=store", ""])
        Path(self.directory, "config.properties").write_text(text, encoding="utf-8")

    def _knock(self, process: "subprocess.Popen[bytes]", port: int, target: str) -> None:
        """Ask until there is an answer."""
        deadline = time.monotonic() + _READY_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            try:
                _fetch(port, target, "GET", timeout=5)
            except OSError:
                time.sleep(_POLL_SECONDS)
            else:
                return
        console = Path(self.directory, "console.log").read_text(errors="replace")
        raise RuntimeError(f"marserve does not answer. Its console:\n{console}")


@contextmanager
def echo(kind: str) -> Iterator[int]:
    """One of the two servers of echo.py; its port."""
    process = subprocess.Popen([sys.executable, _HERE / "echo.py", kind], stdout=subprocess.PIPE)
    with _ended_at_last(process):
        assert process.stdout is not None
        yield int(process.stdout.readline())


def pack(export_path: Path, arguments: Mapping[str, str | Path]) -> None:
    """Write an archive with marserve's own archiver; ``arguments`` are its flags."""
    command: list[str | Path] = [Path(sys.executable).with_name("torch-model-archiver"), "--force"]
    for flag, value in {"version": "1.0", **arguments, "export-path": export_path}.items():
        command += [f"--{flag}", value]
    export_path.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)


@contextmanager
def _ended_at_last(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    with process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _fetch(port: int, target: str, method: str, timeout: float, body: bytes | None = None) -> str:
    headers = {"Content-Type": "application/octet-stream"} if body else {}  # else: a form
    url = f"http://127.0.0.1:{port}{target}"
    request = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{method} {target}: {error.code} {error.read().decode()}") from None


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now; all are held until the last is found, so they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
