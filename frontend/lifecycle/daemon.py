"""Starts a detached server, waits until it listens or fails, and stops it.

The server writes one JSON document to a pipe when it listens or gives up; if it dies before, the
pipe is closed empty.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from marserve.frontend.lifecycle.callers_pipes import CallersPipes
from marserve.frontend.lifecycle.pidfile import PidFile, PidFileError
from marserve.frontend.lifecycle.service_manager import (
    SOCKET_VARIABLE,
    WATCHDOG_PID_VARIABLE,
    ServiceManager,
)
from marserve.frontend.lifecycle.terminal import print_text
from marserve.frontend.logs.setup import log_directories
from marserve.frontend.process_group import ProcessHandle

FORCED_END_SECONDS = 10.0  # of a forced end at most (`stop_watchdog`)

_START_SECONDS = 10.0  # how long a starter waits for its server to listen
_END_SECONDS = 30.0  # how long a server that gives up may take to end
_INTERRUPTED = 130  # the exit status after Ctrl-C
# Less than a pipe buffers, so that the server never waits for its starter.
_MAX_NAMES = 10
_MAX_CHARACTERS = 2000
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """The result of a start."""

    url: str = ""  # where the server listens; empty if it does not
    loading: Sequence[str] = ()  # names of models that are not loaded yet
    error: str = ""  # why it gave up; empty if it died without a report
    failed: Sequence[str] = ()  # names of models that could not be loaded

    def __str__(self) -> str:
        listens = f"The server listens at {self.url}"
        if self.failed:
            names = ", ".join(self.failed)
            return f"{listens}, but models could not be loaded ({names}); see its log."
        if self.loading:
            names = ", ".join(self.loading)
            return f"{listens} and is still loading models ({names}); {_where_to_ask(self.url)}."
        return f"{listens}."


class StartReport:
    """The server's end of the pipe; ``descriptor`` is None without a starter."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)  # a worker must not keep the pipe open
        self.pipes = CallersPipes()

    def listening(self, url: str, loading: Sequence[str], failed: Sequence[str] = ()) -> None:
        """Report that the server listens, and leave the pipes of the starter's caller."""
        self.pipes.leave()
        self._send(Outcome(url, loading[:_MAX_NAMES], failed=failed[:_MAX_NAMES]))

    def failed(self, error: str) -> None:
        """Report why the server gives up."""
        self._send(Outcome(error=error[:_MAX_CHARACTERS]))

    def _send(self, outcome: Outcome) -> None:
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(BrokenPipeError), open(descriptor, "wb") as pipe:  # noqa: PTH123 - a descriptor, not a path
            pipe.write(json.dumps(asdict(outcome)).encode())


def wait_for_outcome(descriptor: int, timeout: float) -> Outcome | None:
    """Read the result of a start from the starter's end of the pipe; None after the timeout."""
    deadline = time.monotonic() + timeout
    received = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(descriptor, _READ_BYTES)
        received += piece
        if not piece:
            return Outcome(**json.loads(received or b"{}"))
    return None


def start(arguments: Sequence[str], url: str) -> int:
    """Start a detached server, print the result, and return the exit status of the command.

    Raises:
        PidFileError: A server runs already.
    """
    pid_file = PidFile()
    claim(pid_file)
    report, inherited = os.pipe()
    try:
        server = subprocess.Popen(  # noqa: S603  our own interpreter, the operator's own flags
            server_command(
                arguments,
                "--pid-descriptor",
                str(pid_file.fileno()),
                "--report-descriptor",
                str(inherited),
            ),
            stdin=subprocess.DEVNULL,
            pass_fds=[pid_file.fileno(), inherited],
            start_new_session=True,
            env={name: os.environ[name] for name in os.environ if name != WATCHDOG_PID_VARIABLE},
        )
    except BaseException:
        pid_file.release()
        raise
    # Sent by the starter: systemd accepts messages of the present main process only.
    ServiceManager(os.environ.get(SOCKET_VARIABLE, "")).main_process(server.pid)
    os.close(inherited)  # otherwise the pipe would stay open when the server dies
    pid_file.hand_over(server.pid)
    try:
        outcome = wait_for_outcome(report, _START_SECONDS)
    except KeyboardInterrupt:
        server.returncode = 0
        print_text("\nThe server continues to start; --stop ends it.")
        return _INTERRUPTED
    if outcome is not None and not outcome.url:
        end = _end_of(server)  # waits: the next start must not find it
        print_text(f"The server did not start: {outcome.error or end}")
        return 1
    server.returncode = 0  # it continues: no ResourceWarning "still running"
    print_text(str(outcome or f"The server is still loading models; {_where_to_ask(url)}."))
    return 0


def become_server(arguments: Sequence[str], argument: str) -> NoReturn:
    """Make this process the server, with a further argument by which others find it."""
    sys.stdout.flush()
    command = server_command(arguments, "--server-argument", argument)
    os.execv(command[0], command)  # noqa: S606  our own interpreter, the operator's own flags


def server_command(arguments: Sequence[str], *inner: str) -> list[str]:
    """Return the command line of a server: the starter's with ``inner`` arguments."""
    # -m puts the working directory first on the import path, which may contain a logging.py of a
    # model's author; -P does not.
    return [sys.executable, "-P", "-m", "marserve.frontend", *arguments, "--foreground", *inner]


def claim(pid_file: PidFile) -> None:
    """Take the pid file for this process; raises PidFileError."""
    if pid_file.claim():
        with contextlib.suppress(OSError):  # a full disk or a closed pipe do not prevent the start
            print_text("Removing orphan pid file.")


def stop(timeout: float) -> int:
    """Stop the server, ours or TorchServe's own, within ``timeout`` seconds; return the status."""
    pid_file = PidFile()
    pid = pid_file.read() or pid_file.read_java()
    if pid is None:
        print_text("TorchServe is not currently running.")
        return 0
    if not _terminate(pid, timeout + FORCED_END_SECONDS):
        print_text("Stopping TorchServe took too long.")
        return 1
    # A server that was stopped at its very start has not removed its pid file.
    with contextlib.suppress(PidFileError):  # the next server has taken it
        pid_file.claim()
        pid_file.release()
    print_text("TorchServe has stopped.")
    return 0


def _where_to_ask(url: str) -> str:
    return f"ask {url} for /ready" if url.startswith("unix:") else f"ask {url}/ready"


def _end_of(server: "subprocess.Popen[bytes]") -> str:
    try:
        status = server.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        server.returncode = 0
        return "it hangs."
    if status == 0:
        return "it was stopped."
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}."
    log = log_directories()[0].absolute() / "ts_log.log"
    return f"it ended with status {status}; the reason may be in {log}."


def _terminate(pid: int, timeout: float) -> bool:
    """Send SIGTERM to a process; return whether it ended within ``timeout`` seconds."""
    server = ProcessHandle(pid)
    try:
        return not server.send(signal.SIGTERM) or server.has_ended_within(timeout)
    finally:
        server.close()
