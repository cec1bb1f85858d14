"""Two ways in which the process of a worker begins; both block, and belong in a thread.

* `start_child`: by multiprocessing, from the fork server or by spawn, in this interpreter.
* `start_command`: by a command line, in whatever interpreter (`marserve.backend.bootstrap`). It
  costs an interpreter start and the import of torch for every worker, and is for those who need
  it: models with packages of their own (the fork server has imported the server's already),
  another ``python``, and workers of several processes.

Either way the process leads a group of its own (but for one that is debugged), has one end of a
socket pair and two output pipes, and its end can be seen by a descriptor.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import IO, Protocol

from marserve.backend.bootstrap import Order, Runner, as_program, command, probe
from marserve.backend.worker import WorkerSetup, main
from marserve.frontend.workers.causes import StackFile

logger = logging.getLogger(__name__)

Context = ForkServerContext | SpawnContext

#: The module that is torch's launcher for CPUs.
CPU_LAUNCHER = "torch.backends.xeon.run_cpu"

_PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process is started with.

    Attributes:
        name: Appears in the model log, e.g. ``W-9000-resnet-152_1.0``.
        environment: Its whole environment.
        python_path: Put in front of ``sys.path``.
        model_dir: Its working directory.
        threads: Intra-op threads of torch and OpenMP; 0 leaves the libraries' own choice.
        python: Interpreter that is started for it; empty for a child of this one.
        runner: What starts its processes in our stead; needs ``python``.
        on_metric_line: Called with what it prints in lines that begin with ``[METRICS]``.
        terminal: Whether its handler is debugged: it stays with the terminal of the server.
    """

    name: str
    environment: Mapping[str, str]
    python_path: tuple[str, ...]
    model_dir: str
    threads: int
    python: str = ""
    runner: Runner | None = None
    on_metric_line: Callable[[str], None] | None = None
    terminal: bool = False


class Child(Protocol):
    """A process that was started.

    Attributes:
        pid: Its process id.
        sentinel: A descriptor that is readable when it has ended.
    """

    pid: int
    sentinel: int

    def reap(self) -> int:
        """Once it has ended: free what stands for it; the exit status, negative for a signal."""

    def abandon(self) -> None:
        """Nobody wants it any more, and its wire was closed: see that it ends."""


@dataclass(frozen=True)
class Started:
    """A process with our ends of its wire and its output, and the file of its stacks."""

    child: Child
    wire: socket.socket
    stdout: IO[bytes]
    stderr: IO[bytes]
    stacks: StackFile

    def abandon(self) -> None:
        """End it."""
        self.stacks.close()
        self.wire.close()
        self.stdout.close()
        self.stderr.close()
        self.child.abandon()


def start_child(context: Context, spec: WorkerSpec) -> Started:
    """Start a child of multiprocessing; its ends are closed here whatever happens.

    Raises:
        OSError: It could not be started.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        wire, their_wire = socket.socketpair()
        ours.callback(wire.close)
        theirs.callback(their_wire.close)
        readers, writers = [], []
        for _ in range(2):
            reader, writer = os.pipe()
            readers.append(ours.enter_context(os.fdopen(reader, "rb", buffering=0)))
            writers.append(theirs.enter_context(Connection(writer, readable=False)))
        stacks = StackFile()
        ours.callback(stacks.close)
        setup = WorkerSetup(
            wire=their_wire,
            stdout=writers[0],
            stderr=writers[1],
            environment=spec.environment,
            python_path=spec.python_path,
            model_dir=spec.model_dir,
            threads=spec.threads,
            stacks=stacks.path,
            terminal_of=os.getpid() if spec.terminal else 0,
        )
        # Not a daemon in multiprocessing's sense: handlers may start processes of their own.
        process = context.Process(target=main, args=(setup,), name=spec.name)
        process.start()
        ours.pop_all()
        return Started(_Multiprocessed(process), wire, readers[0], readers[1], stacks)


class _Multiprocessed:
    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid: int = process.pid
        self.sentinel = process.sentinel
        self._process = process

    def reap(self) -> int:
        self._process.join()  # does not wait: the sentinel has said that it ended
        status = self._process.exitcode
        self._process.close()
        return -1 if status is None else status

    def abandon(self) -> None:
        """Without its wire it ends by itself, and the library reaps it."""


def start_command(spec: WorkerSpec) -> Started:
    """Start an interpreter of its own.

    Raises:
        OSError: It could not be started.
    """
    with contextlib.ExitStack() as ours:
        wire, their_wire = socket.socketpair()
        ours.callback(wire.close)
        stacks = StackFile()
        ours.callback(stacks.close)
        with their_wire:
            process = subprocess.Popen(  # noqa: S603 - the operator's interpreter
                command(spec.python, _order(spec, their_wire.fileno(), stacks.path)),
                env=_environment_at_start(spec),
                cwd=spec.model_dir,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[their_wire.fileno()],
                start_new_session=not spec.terminal,
            )
        assert process.stdout is not None
        assert process.stderr is not None
        ours.enter_context(process.stdout)
        ours.enter_context(process.stderr)
        child = _Commanded(process)
        ours.pop_all()
        return Started(child, wire, process.stdout, process.stderr, stacks)


def check_interpreter(spec: WorkerSpec) -> None:
    """See whether an interpreter can run workers.

    Raises:
        OSError: It cannot; says why.
    """
    try:
        subprocess.run(  # noqa: S603 - the operator's interpreter
            probe(spec.python),
            env=_environment_at_start(spec),
            cwd=tempfile.gettempdir(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or f"exit status {error.returncode}").splitlines()[-1]
        raise OSError(f"The interpreter {spec.python} cannot run workers: {reason}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"The interpreter {spec.python} does not start: {error}") from error


def cpu_launcher_works(python: str) -> bool:
    """See whether torch's launcher for CPUs can be used; warns where it cannot.

    Args:
        python: The interpreter of the workers; empty for this one.
    """
    try:
        subprocess.run(  # noqa: S603 - the operator's interpreter
            [python or sys.executable, *as_program(CPU_LAUNCHER, "--no-python", "true")],
            cwd=tempfile.gettempdir(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("Workers start without the CPU launcher, it does not work here: %s", error)
        return False
    return True


def _order(spec: WorkerSpec, wire: int, stacks: str) -> Order:
    python_path = spec.environment.get("PYTHONPATH")
    return Order(
        wire=wire,
        python_path=spec.python_path,
        model_dir=spec.model_dir,
        threads=spec.threads,
        environment={} if python_path is None else {"PYTHONPATH": python_path},
        runner=spec.runner,
        stacks=stacks,
        terminal_of=os.getpid() if spec.terminal else 0,
    )


def _environment_at_start(spec: WorkerSpec) -> dict[str, str]:
    """The environment, but for what PYTHONPATH holds of the model: see `bootstrap`."""
    environment = dict(spec.environment)
    entries = environment.pop("PYTHONPATH", "").split(os.pathsep)
    inherited = [one for one in entries if one and one not in spec.python_path]
    if inherited:
        environment["PYTHONPATH"] = os.pathsep.join(inherited)
    return environment


class _Commanded:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.pid = process.pid
        try:
            self.sentinel = os.pidfd_open(process.pid)
        except OSError:  # no descriptor left
            process.kill()
            process.wait()
            raise
        self._process = process

    def reap(self) -> int:
        os.close(self.sentinel)
        return self._process.wait()  # does not wait: the sentinel has said that it ended

    def abandon(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()  # one that is debugged leads no group
        self.reap()
