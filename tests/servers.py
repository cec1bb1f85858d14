"""Real servers for the tests: processes, sockets, signals, archives; and the fixtures around them.

Every process of a server, its workers and their children included, carries a mark in its
environment. So what a server leaves behind is found whatever session or parent it has by then.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import requests

from marserve.tools.archiver.archiver import generate_model_archive
from marserve.tools.archiver.config import ModelArchiverConfig
from marserve.tools.archiver.workflow_archiver import (
    WorkflowArchiverConfig,
    generate_workflow_archive,
)

T = TypeVar("T")

HANDLERS = Path(__file__).with_name("integration") / "handlers"
TORCHSERVE = Path(sys.executable).with_name("torchserve")
_PORTS = range(12_000, 32_000)
PATIENCE = 60.0  # seconds for what takes milliseconds on an idle machine


def wait_for(
    condition: Callable[[], T], seconds: float = PATIENCE, what: object = "it did not happen"
) -> T:
    """Ask again and again until the answer is true; returns it."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"{what() if callable(what) else what} ({seconds} s)"
        time.sleep(0.01)
    return answer


class Gate:
    """Holds a handler that reads the named pipe, until the test opens it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._writer: int | None = None

    def wait_entered(self) -> None:
        """Wait until a handler stands before the gate."""
        wait_for(self._reached, what="no handler came to the gate")

    def open(self) -> None:
        """Let the handler go on."""
        self.wait_entered()
        assert self._writer is not None
        os.close(self._writer)
        self._writer = None

    def open_for_all(self) -> None:
        """Let the handler go on, and those that come to the gate again."""
        self.wait_entered()  # else one that comes now would wait for a writer
        no_gate = Path(f"{self.path}-open")
        no_gate.touch()
        no_gate.replace(self.path)
        self.open()

    def close(self) -> None:
        """At the end of a test, whatever happened."""
        if self._writer is not None:
            os.close(self._writer)

    def _reached(self) -> bool:
        if self._writer is None:
            try:
                self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:  # nobody reads yet
                    raise
                return False
        return True


class Server:
    """A server in a directory of its own; see `start_server`.

    Attributes:
        directory: Its working directory, with ``config.properties`` and ``logs``.
        store: Its model store.
        temp: ``TMPDIR`` and ``TEMP`` of it.
        ports: Name of an HTTP listener to its port.
        grpc_ports: Name of a gRPC listener to its port.
        environment: What it is started with.
        program: The command line; ours, or TorchServe's own where the two are compared.
        habits: Flags it is always started with.
        process: The process, once `start` was called.
    """

    def __init__(
        self,
        directory: Path,
        environment: dict[str, str],
        properties: Any,
        program: Path = TORCHSERVE,
    ) -> None:
        self.program = program
        self.directory = directory
        self.store = directory / "model_store"
        self.temp = directory / "t"
        self.console = directory / "console.txt"
        self.store.mkdir()
        self.temp.mkdir()
        ports = free_ports(5)
        self.ports = dict(zip(("inference", "management", "metrics"), ports[:3], strict=True))
        self.grpc_ports = dict(zip(("inference", "management"), ports[3:], strict=True))
        self.mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            "TMPDIR": str(self.temp),
            "TEMP": str(self.temp),
            "MARSERVE_TEST": self.mark,
            **environment,
        }
        self.habits = ["--ncs"]
        self.process: subprocess.Popen[bytes] | None = None
        self._write_properties(properties)

    def _write_properties(self, properties: dict[str, str]) -> None:
        settings = {
            f"{name}_address": f"http://127.0.0.1:{port}" for name, port in self.ports.items()
        }
        settings |= {f"grpc_{name}_port": str(port) for name, port in self.grpc_ports.items()}
        settings |= {
            "model_store": str(self.store),
            "preload_modules": "",
            "drain_timeout": "10",
            "disable_system_metrics": "true",
            **properties,
        }
        text = "".join(f"{key}={value}\n" for key, value in settings.items())
        (self.directory / "config.properties").write_text(text)

    # Life

    def write_property(self, key: str, value: str) -> None:
        """Set one more key before it starts."""
        with (self.directory / "config.properties").open("a") as file:
            file.write(f"{key}={value}\n")

    def start(self, *arguments: str) -> None:
        """Start it in the foreground and wait until /ping is answered."""
        self.launch(*arguments)
        self.wait_ready()

    def launch(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start it in the foreground and do not wait."""
        with self.console.open("ab") as console:
            self.process = subprocess.Popen(
                [self.program, "--foreground", *self.habits, *arguments],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.process

    def wait_ready(self) -> None:
        """Wait until the inference listener answers, whatever it says, and all are open."""
        wait_for(self._answers, what=self.console_text)
        wait_for(lambda: all(map(is_open, self.ports.values())), what=self.console_text)

    def _answers(self) -> bool:
        if self.process is not None:
            assert self.process.poll() is None, self.console_text()
        try:
            self.inference("GET", "/ping")
        except requests.ConnectionError:
            return False
        return True

    def terminate(self, number: int = signal.SIGTERM) -> None:
        """Ask it to stop."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop it; it must end well and leave nothing."""
        self.terminate(number)
        self.wait_stopped()

    def wait_stopped(self, seconds: float = PATIENCE) -> None:
        """Wait for the end of one that was told to stop; it must end well and leave nothing."""
        assert self.process is not None
        assert self.process.wait(seconds) == 0, self.console_text()
        assert "TorchServe has stopped." in self.console_text()
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """No process, no listener, no temporary file."""
        # The fork server ends by itself when it sees the end of the server, a moment later.
        wait_for(lambda: not self.processes(), 3, what=self._command_lines)
        assert not any(map(is_open, (*self.ports.values(), *self.grpc_ports.values())))
        assert list(self.temp.iterdir()) == []

    def close(self) -> None:
        """End whatever is left of it."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Every living process that was started by it, itself included."""
        return [process for process in psutil.process_iter() if self._is_marked(process)]

    def _command_lines(self) -> list[list[str]]:
        return [process.cmdline() for process in self.processes()]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            return not is_zombie and process.environ().get("MARSERVE_TEST") == self.mark
        except psutil.Error:
            return False

    # Requests

    def inference(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """A request to the inference listener."""
        return self._request("inference", method, path, kwargs)

    def management(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """A request to the management listener."""
        return self._request("management", method, path, kwargs)

    def metrics(self, *names: str) -> dict[str, float]:
        """The samples of the metrics listener: series to value."""
        text = self._request("metrics", "GET", "/metrics", {"params": {"name[]": names}}).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {series: float(value) for series, _, value in lines}

    def _request(self, listener: str, method: str, path: str, kwargs: Any) -> requests.Response:
        url = f"http://127.0.0.1:{self.ports[listener]}{path}"
        return requests.request(method, url, **{"timeout": PATIENCE, **kwargs})

    def predict(self, model: str, **kwargs: Any) -> requests.Response:
        """A prediction; keywords are those of requests."""
        return self.inference("POST", f"/predictions/{model}", **kwargs)

    def ask(self, model: str, **orders: Any) -> requests.Response:
        """A prediction of handlers/lab.py, which does what it is told."""
        return self.predict(model, json=orders)

    def exchange(self, listener: str, sent: bytes, until: bytes = b"\0never") -> bytes:
        """Send bytes, read until something came or to the end of the connection."""
        with self.connect(listener) as connection:
            connection.sendall(sent)
            return read(connection, until)

    def connect(self, listener: str) -> socket.socket:
        """A connection to a listener."""
        return socket.create_connection(("127.0.0.1", self.ports[listener]), timeout=PATIENCE)

    # Models

    def register(self, url: str | Path, **parameters: Any) -> requests.Response:
        """Register an archive, by query."""
        name = url.name if isinstance(url, Path) else url
        return self.management("POST", "/models", params={"url": name, **parameters})

    def install(self, handler: str | Path, name: str, config: str = "", **query: Any) -> None:
        """Pack a handler and register it with one worker."""
        archive = make_archive(self.store, handler, f"archive-of-{name}", config)
        answer = self.register(archive, **{"initial_workers": 1, "model_name": name, **query})
        assert answer.status_code == 200, answer.text

    def describe(self, name: str) -> dict[str, Any]:
        """The default version of a model."""
        answer = self.management("GET", f"/models/{name}")
        assert answer.status_code == 200, answer.text
        return answer.json()[0]

    def is_known(self, name: str) -> bool:
        """Whether a model is registered."""
        return self.management("GET", f"/models/{name}").status_code == 200

    def worker(self, name: str) -> dict[str, Any]:
        """The first worker of a model."""
        return self.describe(name)["workers"][0]

    def wait_queued(self, name: str, count: int) -> None:
        """Wait until so many requests of a model wait for a worker."""
        wait_for(
            lambda: self.describe(name)["jobQueueStatus"]["pendingRequests"] == count,
            what=lambda: self.describe(name)["jobQueueStatus"],
        )

    def wait_taken(self, name: str, count: int) -> None:
        """Wait until so many requests of a model are open, and none of them waits for a worker."""
        counts: dict[str, float] = {}

        def are_open() -> bool:
            counts.update(self.metrics("marserve_open_requests"))
            return [n for series, n in counts.items() if f'"{name}"' in series] == [count]

        wait_for(are_open, what=lambda: counts)
        self.wait_queued(name, 0)

    def wait_workers(self, name: str, *states: str) -> None:
        """Wait until the workers of a model are in these states."""
        wait_for(
            lambda: [worker["status"] for worker in self.describe(name)["workers"]] == list(states),
            what=lambda: self.describe(name)["workers"],
        )

    def unpacked(self) -> set[str]:
        """The directories of unpacked archives."""
        return {path.name for path in self.temp.glob("marserve-*/models/*")}

    # Workflows

    def workflow(self, name: str) -> dict[str, Any]:
        """The description of a workflow."""
        description: dict[str, Any] = self.management("GET", f"/workflows/{name}").json()[0]
        return description

    def runs(self, name: str) -> list[dict[str, Any]]:
        """The last runs of a workflow."""
        runs: list[dict[str, Any]] = self.management("GET", f"/workflows/{name}/runs").json()[
            "runs"
        ]
        return runs

    def unpacked_workflows(self) -> set[str]:
        """The directories of unpacked workflow archives."""
        return {path.name for path in self.temp.glob("marserve-*/workflows/*")}

    # Logs

    def log(self, name: str) -> str:
        """What a log file holds by now."""
        return (self.directory / "logs" / name).read_text(encoding="utf-8")

    def wait_logged(self, name: str, text: str) -> None:
        """Wait until a log file holds a text."""
        wait_for(lambda: text in self.log(name), what=lambda: f"{text!r} in {self.log(name)}")

    def console_text(self) -> str:
        """What it printed."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""


def make_archive(
    folder: Path, handler: str | Path, name: str = "model", config: str = "", **options: Any
) -> Path:
    """Pack a handler, given as its source, as a file, or as the name of a built-in one.

    Args:
        folder: Where the archive goes.
        handler: Source of the handler, its file, or its name.
        name: Name of the model and of the archive.
        config: Text of model-config.yaml.
        **options: Those of `ModelArchiverConfig`.
    """
    work = folder / f".{uuid.uuid4().hex}"
    work.mkdir()
    if isinstance(handler, str) and not handler.isidentifier():
        source = work / "handler.py"
        source.write_text(handler)
        handler = source
    if config:
        options["config_file"] = str(work / "model-config.yaml")
        Path(options["config_file"]).write_text(config)
    settings = {"version": "1.0", "handler": str(handler), "force": True, **options}
    return generate_model_archive(
        ModelArchiverConfig(model_name=name, export_path=str(folder), **settings)
    )


def make_workflow(folder: Path, name: str, specification: str, handler: str = "") -> Path:
    """Pack a workflow, given the text of its YAML and the source of its functions."""
    work = folder / f".{uuid.uuid4().hex}"
    work.mkdir()
    (work / "spec.yaml").write_text(specification)
    if handler:
        (work / "functions.py").write_text(handler)
    return generate_workflow_archive(
        WorkflowArchiverConfig(
            name,
            str(work / "spec.yaml"),
            str(work / "functions.py") if handler else None,
            export_path=str(folder),
            force=True,
        )
    )


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that no process uses and no other test session gets.

    The sessions of a machine, the processes of pytest-xdist among them, take the next ports of a
    counter in a file. The kernel does not give these ports to clients, as it does with those from
    32768 upwards; and a port that was bound and closed again could go to two servers, because
    those of gRPC share a port without an error.
    """
    found: list[int] = []
    counter = Path(tempfile.gettempdir()) / f"marserve-test-ports-{os.getuid()}"
    with counter.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        last = int(file.read() or random.choice(_PORTS))
        while len(found) < count:
            last = last + 1 if last + 1 in _PORTS else _PORTS.start
            if _can_bind(last):
                found.append(last)
        file.truncate(0)
        file.write(str(last))
    return found


def _can_bind(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def is_open(port: int) -> bool:
    """Whether somebody listens at a port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def read(connection: socket.socket, until: bytes = b"\0never") -> bytes:
    """Read until something came, or to the end of the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while until not in received and (chunk := connection.recv(65536)):
            received += chunk
    return bytes(received)


StartServer = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def prepare_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Make a server that is not started yet; whatever is left of it ends with the block."""

    @contextlib.contextmanager
    def prepare(environment: dict[str, str] | None = None, **properties: str) -> Iterator[Server]:
        server = Server(tmp_path_factory.mktemp("s"), environment or {}, properties)
        try:
            yield server
        finally:
            server.close()

    return prepare


@pytest.fixture(scope="session")
def start_server(prepare_server: StartServer) -> StartServer:
    """Run a server for a ``with`` block; unless it was ended inside, it must stop well."""

    @contextlib.contextmanager
    def start(*arguments: str, **properties: str) -> Iterator[Server]:
        with prepare_server(**properties) as server:
            server.start(*arguments)
            yield server
            if server.is_running:
                server.stop()

    return start


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Iterator[Server]:
    """A server that the tests of a module share."""
    with start_server() as shared:
        yield shared


@pytest.fixture(scope="session")
def handlers() -> Path:
    """The folder with the handlers that several tests use."""
    return HANDLERS


@pytest.fixture(name="make_archive", scope="session")
def archive_maker() -> Callable[..., Path]:
    """`make_archive`."""
    return make_archive


@pytest.fixture(name="make_workflow", scope="session")
def workflow_maker() -> Callable[..., Path]:
    """`make_workflow`."""
    return make_workflow


@pytest.fixture
def install_workflow(server: Server) -> Iterator[Callable[..., str]]:
    """Register a workflow under a name of its own; returns the name. Ends with the test."""
    names: list[str] = []

    def install(specification: str, handler: str = "", **query: Any) -> str:
        name = f"w{uuid.uuid4().hex[:8]}"
        archive = make_workflow(server.store, name, specification, handler)
        answer = server.management("POST", "/workflows", params={"url": archive.name, **query})
        assert answer.status_code == 200, answer.text
        names.append(name)
        return name

    yield install
    for name in names:
        server.management("DELETE", f"/workflows/{name}")


@pytest.fixture(name="wait_for", scope="session")
def waiter() -> Callable[..., Any]:
    """`wait_for`."""
    return wait_for


@pytest.fixture(scope="session")
def read_to_end() -> Callable[..., bytes]:
    """`read`."""
    return read


@pytest.fixture
def install(server: Server, handlers: Path, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Install the lab, or another handler, under a name of this test's own; returns the name."""
    number = itertools.count()

    def make(config: str = "", handler: str | Path = handlers / "lab.py", **query: Any) -> str:
        name = f"model-{abs(hash(request.node.name))}-{next(number)}"
        server.install(handler, name, config, **query)
        return name

    return make


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """An empty file for handlers to write to."""
    path = tmp_path / "record"
    path.touch()
    return path


@pytest.fixture
def make_gate(tmp_path: Path) -> Iterator[Callable[[], Gate]]:
    """Make gates for handlers to wait at."""
    with contextlib.ExitStack() as gates:

        def make() -> Gate:
            gate = Gate(tmp_path / f"gate-{uuid.uuid4().hex}")
            gates.callback(gate.close)
            return gate

        yield make


@pytest.fixture
def gate(make_gate: Callable[[], Gate]) -> Gate:
    """A gate for a handler to wait at."""
    return make_gate()


@pytest.fixture
def background() -> Iterator[Callable[..., "Future[Any]"]]:
    """Call something in a thread."""
    with ThreadPoolExecutor(128) as threads:
        yield threads.submit


@pytest.fixture
def together(background: Callable[..., "Future[Any]"]) -> Callable[..., list[Any]]:
    """Call several things at the same time; their results in order."""

    def call(calls: Sequence[Callable[[], Any]]) -> list[Any]:
        return [future.result(PATIENCE) for future in [background(each) for each in calls]]

    return call
