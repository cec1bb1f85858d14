"""Real servers for the tests: processes, sockets, signals, archives, and fixtures for them.

Every process of a server, its workers and their children included, has a mark in its environment.
So a process that a server leaves behind is found in any session and below any parent.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import requests
import watched_program

from marserve.tools.archiver.archiver import generate_model_archive
from marserve.tools.archiver.config import ModelArchiverConfig
from marserve.tools.archiver.workflow_archiver import (
    WorkflowArchiverConfig,
    generate_workflow_archive,
)

T = TypeVar("T")

HANDLERS = Path(__file__).with_name("integration") / "handlers"
ENGINE = Path(__file__).with_name("integration") / "stand_ins" / "engine.py"
TORCHSERVE = Path(sys.executable).with_name("torchserve")
_watched: list["Server"] = []  # by `no_slow_turn`
_PORTS = range(12_000, 32_000)
PATIENCE = 60.0  # seconds for what takes milliseconds on an idle machine


def wait_for(
    condition: Callable[[], T], seconds: float = PATIENCE, what: object = "it did not happen"
) -> T:
    """Call a condition until its result is true, and return the result."""
    deadline = time.monotonic() + seconds
    pause = 0.005
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"{what() if callable(what) else what} ({seconds} s)"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.03)
    return answer


class Gate:
    """A named pipe that blocks a handler which reads it, until the test opens it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._writer: int | None = None

    def wait_entered(self) -> None:
        """Wait until a handler reads the pipe."""
        wait_for(self._reached, what="no handler reads the pipe of the gate")

    def open(self) -> None:
        """Let the handler continue."""
        self.wait_entered()
        assert self._writer is not None
        os.close(self._writer)
        self._writer = None

    def open_for_all(self) -> None:
        """Let the handler continue, and each one that reads the path later."""
        self.wait_entered()  # or a handler that opens the pipe now waits for a writer
        no_gate = Path(f"{self.path}-open")
        no_gate.touch()
        no_gate.replace(self.path)
        self.open()

    def close(self) -> None:
        """Close the pipe at the end of a test."""
        if self._writer is not None:
            os.close(self._writer)

    def _reached(self) -> bool:
        if self._writer is None:
            try:
                self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:  # no process reads yet
                    raise
                return False
        return True


def held_import(folder: Path, module: str, gate: Gate) -> dict[str, str]:
    """Return the environment in which a module is only imported once the gate is open."""
    (folder / f"{module}.py").write_text(_HELD_IMPORT)
    return {"PYTHONPATH": str(folder), "GATE": gate.path}


_HELD_IMPORT = """
import importlib, os, sys

with open(os.environ["GATE"]):
    pass
sys.path.remove(os.path.dirname(__file__))
del sys.modules[__name__]
sys.modules[__name__] = importlib.import_module(__name__)
"""


class Server:
    """A server in a directory that no other server uses.

    Attributes:
        directory: Its working directory, with ``config.properties`` and ``logs``.
        store: Its model store.
        temp: Its ``TMPDIR`` and ``TEMP``.
        ports: Name of an HTTP listener to its port.
        grpc_ports: Name of a gRPC listener to its port.
        environment: The environment of its process.
        program: The command; ours, or TorchServe's where the two are compared.
        habits: Flags of each start.
        process: The process, after `start` or `launch`.
        slow_turns: A file with the slow turns of its event loop since it was ready.
    """

    def __init__(
        self,
        directory: Path,
        environment: dict[str, str],
        properties: Any,
        program: Path = TORCHSERVE,
    ) -> None:
        self.program = program
        self.slow_turns = directory / "slow_turns.txt"
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
            watched_program.SLOW_TURNS: str(self.slow_turns),
            **environment,
        }
        self.habits = ["--ncs"]
        self.process: subprocess.Popen[bytes] | None = None
        self._read_from: dict[Path, int] = {}
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
        """Add a key to the configuration before the start."""
        with (self.directory / "config.properties").open("a") as file:
            file.write(f"{key}={value}\n")

    def start(self, *arguments: str) -> None:
        """Start the server in the foreground and wait until it answers /ping."""
        self.launch(*arguments)
        self.wait_ready()

    def launch(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start the server in the foreground and do not wait."""
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
        """Wait until the inference listener answers with any status and all listeners are open."""
        wait_for(self._answers, what=self.console_text)
        wait_for(lambda: all(map(is_open, self.ports.values())), what=self.console_text)
        self.slow_turns.unlink(missing_ok=True)  # those of the start

    def _answers(self) -> bool:
        if self.process is not None:
            assert self.process.poll() is None, self.console_text()
        if not is_open(self.ports["inference"]):
            return False
        try:
            self.inference("GET", "/ping")
        except requests.ConnectionError:
            return False
        return True

    def terminate(self, number: int = signal.SIGTERM) -> None:
        """Send a signal, by default SIGTERM."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop the server; it must end with status 0 and leave nothing."""
        self.terminate(number)
        self.wait_stopped()

    def wait_stopped(self, seconds: float = PATIENCE) -> None:
        """Wait for the end of a server that stops: with status 0, and nothing left."""
        assert self.process is not None
        assert self.process.wait(seconds) == 0, self.console_text()
        self.wait_printed("TorchServe has stopped.")
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """Assert that no process, listener or temporary file is left."""
        # The fork server ends when the server's socket closes, shortly after the server.
        wait_for(lambda: not self.processes(), what=self._command_lines)
        assert not any(map(is_open, (*self.ports.values(), *self.grpc_ports.values())))
        assert list(self.temp.iterdir()) == []

    def close(self) -> None:
        """Kill all of its processes."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Return each running process of the server, the frontend included."""
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
        """Send a request to the inference listener."""
        return self._request("inference", method, path, kwargs)

    def management(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """Send a request to the management listener."""
        return self._request("management", method, path, kwargs)

    def metrics(self, *names: str) -> dict[str, float]:
        """Return the samples of the metrics listener: series to value."""
        text = self._request("metrics", "GET", "/metrics", {"params": {"name[]": names}}).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {series: float(value) for series, _, value in lines}

    def _request(self, listener: str, method: str, path: str, kwargs: Any) -> requests.Response:
        url = f"http://127.0.0.1:{self.ports[listener]}{path}"
        return requests.request(method, url, **{"timeout": PATIENCE, **kwargs})

    def predict(self, model: str, **kwargs: Any) -> requests.Response:
        """Request a prediction; keywords are those of requests."""
        return self.inference("POST", f"/predictions/{model}", **kwargs)

    def ask(self, model: str, **orders: Any) -> requests.Response:
        """Request a prediction of handlers/lab.py, which follows the orders in its input."""
        return self.predict(model, json=orders)

    def exchange(self, listener: str, sent: bytes, until: bytes = b"\0never") -> bytes:
        """Send bytes, and read to a text or to the end of the connection."""
        with self.connect(listener) as connection:
            connection.sendall(sent)
            return read(connection, until)

    def connect(self, listener: str) -> socket.socket:
        """Connect to a listener."""
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
        """Return the description of a model's default version."""
        answer = self.management("GET", f"/models/{name}")
        assert answer.status_code == 200, answer.text
        return answer.json()[0]

    def is_known(self, name: str) -> bool:
        """Whether a model is registered."""
        return self.management("GET", f"/models/{name}").status_code == 200

    def worker(self, name: str) -> dict[str, Any]:
        """Return the description of a model's first worker."""
        return self.describe(name)["workers"][0]

    def wait_queued(self, name: str, count: int) -> None:
        """Wait until this number of a model's requests are queued."""
        wait_for(
            lambda: self.describe(name)["jobQueueStatus"]["pendingRequests"] == count,
            what=lambda: self.describe(name)["jobQueueStatus"],
        )

    def wait_taken(self, name: str, count: int) -> None:
        """Wait until this number of a model's requests are open, and none of them is queued."""
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

    def kill_worker(self, name: str, number: int = signal.SIGKILL) -> None:
        """Kill a model's only worker, and wait until its successor is ready."""
        pid = self.worker(name)["pid"]
        os.kill(pid, number)
        wait_for(lambda: self.worker(name)["pid"] not in (pid, -1), what="no successor started")
        self.wait_workers(name, "READY")

    def unpacked(self) -> set[str]:
        """Return the directories of unpacked archives."""
        return {path.name for path in self.temp.glob("marserve-*/models/*")}

    def unregister_all(self) -> None:
        """Unregister every workflow and model, and wait until their files are gone."""
        wait_for(self._is_empty, what="models stay")
        wait_for(lambda: not self.unpacked() | self.unpacked_workflows(), what=self.unpacked)

    def _is_empty(self) -> bool:
        """Unregister what can be now: a default version only after the others of its model."""
        workflows = self.management("GET", "/workflows?limit=1000").json()["workflows"]
        models = self.management("GET", "/models?limit=1000").json()["models"]
        paths = [f"/workflows/{each['workflowName']}" for each in workflows]
        for name in {each["modelName"] for each in models}:
            versions = self.management("GET", f"/models/{name}/all").json()
            paths += [f"/models/{name}/{each['modelVersion']}" for each in versions]
        for path in paths:
            self.management("DELETE", path)
        return not paths

    # Workflows

    def workflow(self, name: str) -> dict[str, Any]:
        """Return the description of a workflow."""
        description: dict[str, Any] = self.management("GET", f"/workflows/{name}").json()[0]
        return description

    def runs(self, name: str) -> list[dict[str, Any]]:
        """Return the last runs of a workflow."""
        runs: list[dict[str, Any]] = self.management("GET", f"/workflows/{name}/runs").json()[
            "runs"
        ]
        return runs

    def unpacked_workflows(self) -> set[str]:
        """Return the directories of unpacked workflow archives."""
        return {path.name for path in self.temp.glob("marserve-*/workflows/*")}

    # Logs

    def log(self, name: str) -> str:
        """Return the text of a log file."""
        return self._new_text(self.directory / "logs" / name).decode()

    def wait_logged(self, name: str, text: str) -> None:
        """Wait until a log file contains a text."""
        wait_for(lambda: text in self.log(name), what=lambda: f"{text!r} in {self.log(name)}")

    def console_text(self) -> str:
        """Return the output of the server's process."""
        return (
            self._new_text(self.console).decode(errors="replace") if self.console.exists() else ""
        )

    def wait_printed(self, text: str) -> None:
        """Wait until the server's process has printed a text."""
        wait_for(lambda: text in self.console_text(), what=self.console_text)

    def skip_logs(self) -> None:
        """Let `log` and `console_text` return only what is written from now on."""
        files = [self.console, *(self.directory / "logs").glob("*")]
        self._read_from = {file: file.stat().st_size for file in files}

    def _new_text(self, file: Path) -> bytes:
        return file.read_bytes()[self._read_from.get(file, 0) :]


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


def make_engine_program(folder: Path) -> str:
    """Make a program ``vllm``, the stand-in of an engine; return a PATH with it."""
    program = folder / "vllm"
    run = f"runpy.run_path({str(ENGINE)!r}, run_name='__main__')"
    program.write_text(f"#!{sys.executable}\nimport runpy\n{run}\n")
    program.chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


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
    """Whether a process listens at a port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def read(connection: socket.socket, until: bytes = b"\0never") -> bytes:
    """Read to a text, or to the end of the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while until not in received and (chunk := connection.recv(65536)):
            received += chunk
    return bytes(received)


@pytest.fixture(scope="session")
def prepare_server(tmp_path_factory):
    """Make a server that is not started; its processes end with the ``with`` block."""

    program = watched_program.make_program(tmp_path_factory.mktemp("program"))

    @contextlib.contextmanager
    def prepare(environment=None, **properties):
        server = Server(tmp_path_factory.mktemp("s"), environment or {}, properties, program)
        _watched.append(server)
        try:
            yield server
        finally:
            server.close()

    return prepare


@pytest.fixture(autouse=True)
def no_slow_turn():
    """Fail a test during which the event loop of a server had a slow turn."""
    yield
    turns = [turn for server in _watched for turn in watched_program.slow_turns(server.slow_turns)]
    _watched[:] = [server for server in _watched if server.is_running]
    assert not turns, "\n".join(turns)


@pytest.fixture(scope="session")
def start_server(prepare_server):
    """Run a server for a ``with`` block; if the block does not end it, it must stop cleanly."""

    @contextlib.contextmanager
    def start(*arguments, **properties):
        with prepare_server(**properties) as server:
            server.start(*arguments)
            yield server
            if server.is_running:
                server.stop()

    return start


@pytest.fixture(scope="session")
def share_server(prepare_server):
    """Use a server for a ``with`` block; the next block with the same properties gets it again.

    A block gets a server without models and workflows, and reads logs from its own time. Counters
    and settings keep what earlier blocks did: a test that needs them new uses `start_server`.
    """
    idle = {}
    with contextlib.ExitStack() as stack:

        @contextlib.contextmanager
        def share(**properties):
            key = frozenset(properties.items())
            if key in idle:
                server = idle.pop(key)
            else:
                server = stack.enter_context(prepare_server(**properties))
                server.start()
            yield server
            if server.is_running:
                server.unregister_all()
                server.skip_logs()
                idle[key] = server

        yield share
        for server in idle.values():
            server.stop()


@pytest.fixture(scope="module")
def server(share_server):
    """Return a server without models, which modules use one after the other."""
    with share_server() as shared:
        yield shared


@pytest.fixture(scope="session")
def handlers():
    """Return the folder with the handlers that several tests use."""
    return HANDLERS


@pytest.fixture(name="make_archive", scope="session")
def archive_maker():
    """`make_archive`."""
    return make_archive


@pytest.fixture(name="make_workflow", scope="session")
def workflow_maker():
    """`make_workflow`."""
    return make_workflow


@pytest.fixture
def install_workflow(server):
    """Register a workflow under a new name, and return the name; it ends with the test."""
    names = []

    def install(specification, handler="", **query):
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
def waiter():
    """`wait_for`."""
    return wait_for


@pytest.fixture(scope="session")
def read_to_end():
    """`read`."""
    return read


@pytest.fixture
def install(server, handlers, request):
    """Install the lab, or another handler, under a name of this test, and return the name."""
    number = itertools.count()

    def make(config="", handler=handlers / "lab.py", **query):
        name = f"model-{abs(hash(request.node.name))}-{next(number)}"
        server.install(handler, name, config, **query)
        return name

    return make


@pytest.fixture
def record(tmp_path):
    """Return an empty file to which handlers write."""
    path = tmp_path / "record"
    path.touch()
    return path


@pytest.fixture
def make_gate(tmp_path):
    """Make gates at which handlers wait."""
    with contextlib.ExitStack() as gates:

        def make():
            gate = Gate(tmp_path / f"gate-{uuid.uuid4().hex}")
            gates.callback(gate.close)
            return gate

        yield make


@pytest.fixture
def gate(make_gate):
    """Return a gate at which a handler waits."""
    return make_gate()


@pytest.fixture
def background():
    """Call a function in a thread."""
    with ThreadPoolExecutor(128) as threads:
        yield threads.submit


@pytest.fixture
def together(background):
    """Call several functions at the same time, and return their results in order."""

    def call(calls):
        return [future.result(PATIENCE) for future in [background(each) for each in calls]]

    return call
