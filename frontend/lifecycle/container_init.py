"""The first process of a container: ``marserve-init COMMAND``. The container ends with the server.

TorchServe's image runs a shell script that starts a detached server and then waits without end
(``tail -f /dev/null``), and so do the scripts of its users. They ignore the signal to stop, and the
container continues when its server has died. With this program in front they can stay as they are:

* The server or its starter sends the server's process id, by the protocol of sd_notify(3).
* When the server has ended, this program ends with its status, and the kernel ends the rest of the
  container. Without a server it ends with the command.
* A command that fails after it has started the server ends the server, too.
* SIGTERM and SIGINT go to the server, which finishes accepted requests, and to the command.
* Orphaned processes are reaped.

``torchserve`` and ``marserve`` run themselves below it where they are the first process.
"""

import contextlib
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence

from marserve.backend.processes.runner import become_subreaper
from marserve.frontend.lifecycle.service_manager import SOCKET_VARIABLE, ServiceManager
from marserve.frontend.process_group import ProcessHandle

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_FORWARDED = (*_STOPS, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TYPED = (signal.SIGINT, signal.SIGQUIT)
# A server that was stopped may be restarted by the command within this time.
_RESTART_SECONDS = 3.0
_PID = re.compile("[1-9][0-9]{0,8}")  # the kernel accepts no longer ones
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_MESSAGE_BYTES = 1 << 16
_MAX_MESSAGES = 100  # between two looks at signals and ended processes
_NOT_FOUND, _NOT_EXECUTABLE, _USAGE = 127, 126, 2


def main() -> int:
    """Run the command of the arguments; return the exit status."""
    if len(sys.argv) == 1:
        print("usage: marserve-init COMMAND [ARGUMENT ...]", file=sys.stderr)  # noqa: T201
        return _USAGE
    return supervise(sys.argv[1:])


def supervise(command: Sequence[str]) -> int:
    """Run a command until the server that it starts has ended; return the exit status."""
    try:
        return _Init(command).run()
    except (FileNotFoundError, PermissionError) as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


class _Process(ProcessHandle):
    """The command or the server."""

    has_ended = False
    status: int | None = None  # the exit status; None if it is not a child of ours

    def __init__(self, pid: int) -> None:
        with contextlib.suppress(OSError):  # no descriptor is left, or it is the id of a thread
            super().__init__(pid)

    def send(self, number: int) -> bool:
        try:
            return super().send(number)
        except PermissionError:  # it belongs to another user
            return True

    def is_gone(self) -> bool:
        # On kernels without pidfds; the end of another's child is seen at the next SIGCHLD.
        return self.pidfd < 0 and not self.send(0)

    def gets_typed_signals(self) -> bool:
        # From the terminal, as this process.
        with contextlib.suppress(OSError):
            return os.isatty(0) and os.getpgid(self.pid) == os.getpgrp()
        return False


class _Init:
    def __init__(self, command: Sequence[str]) -> None:
        with contextlib.suppress(OSError):  # the first process inherits orphans without it
            become_subreaper()
        self._outer = ServiceManager.from_environ(os.environ)  # of the container
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        name = f"marserve-init-{os.urandom(8).hex()}"
        self._listener.bind(f"\0{name}")
        self._received, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # numbers of signals
        signal.set_wakeup_fd(wakeup)
        for number in (*_FORWARDED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self._server: _Process | None = None
        self._reported_stopping = False
        self._is_stopping = False
        self._failure: int | None = None  # status of the command that failed after the start
        self._ended = 0.0  # when the server ended
        environment = {**os.environ, SOCKET_VARIABLE: f"@{name}"}
        ignored_by_python = [signal.SIGPIPE, signal.SIGXFSZ]
        self._command = _Process(
            os.posix_spawnp(command[0], list(command), environment, setsigdef=ignored_by_python)
        )

    def run(self) -> int:
        while (status := self._outcome()) is None:
            self._wait()
            signals = self._read_signals()  # first: a later SIGCHLD ends the next wait
            self._receive()  # before processes are reaped, whose messages may be waiting
            self._reap()
            for number in signals:
                self._forward(number)
        return status

    def _outcome(self) -> int | None:
        """The status to end with; None to continue."""
        command, server = self._command, self._server
        if server is None:
            return command.status
        if not server.has_ended:
            if command.status and not self._is_stopping:
                self._failure, self._is_stopping = command.status, True
                server.send(signal.SIGTERM)
            return None
        may_restart = not (self._is_stopping or server.status or command.has_ended)
        return None if may_restart and self._restart_seconds() > 0 else self._status_of(server)

    def _status_of(self, server: _Process) -> int:
        if self._failure is not None:
            return self._failure
        if server.status is not None:
            return server.status
        # The server was a child of the command, whose status is used unless it was stopped, too.
        status = None if self._is_stopping else self._command.status
        return status or int(not self._reported_stopping)

    def _restart_seconds(self) -> float:
        return self._ended + _RESTART_SECONDS - time.monotonic()

    def _wait(self) -> None:
        poll, server = select.poll(), self._server
        poll.register(self._received, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        seconds = None  # no deadline: it waits for the end of the container
        if server is not None and server.has_ended:
            seconds = max(0.0, self._restart_seconds())
        elif server is not None and server.pidfd >= 0:
            poll.register(server.pidfd, select.POLLIN)
        events = poll.poll(None if seconds is None else seconds * 1000)
        if server is not None and server.pidfd in [descriptor for descriptor, _ in events]:
            self._set_ended(server)

    def _read_signals(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._received, _MAX_MESSAGE_BYTES)
        return b""

    def _forward(self, number: int) -> None:
        if number not in _FORWARDED:
            return
        is_stop = number in _STOPS
        self._is_stopping |= is_stop
        server = self._server
        targets = [server] if server is not None and not server.has_ended else []
        if not targets or (is_stop and targets[0].pid != self._command.pid):
            targets.append(self._command)
        for process in targets:
            if not (number in _TYPED and process.gets_typed_signals()):
                process.send(number)

    def _receive(self) -> None:
        for _ in range(_MAX_MESSAGES):
            try:
                message, ancillary, _, _ = self._listener.recvmsg(
                    _MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                return
            if _is_trusted(ancillary):
                self._handle(message.decode(errors="replace").splitlines())

    def _handle(self, lines: Sequence[str]) -> None:
        for line in lines:
            key, _, value = line.partition("=")
            if key == "MAINPID" and _PID.fullmatch(value) and int(value) != os.getpid():
                self._adopt(int(value))
            self._reported_stopping |= line == "STOPPING=1"
        if others := [line for line in lines if not line.startswith("MAINPID=")]:
            self._outer.send(*others)

    def _adopt(self, pid: int) -> None:
        if self._server is not None:
            if not self._server.has_ended or self._server.pid == pid:
                return
            self._server.close()
        self._reported_stopping = False
        server = self._command if pid == self._command.pid else _Process(pid)
        if server.is_reaped:
            return
        self._server = server
        if self._is_stopping:  # since before the command started the server
            server.send(signal.SIGTERM)

    def _reap(self) -> None:
        for pid, code in _ended_children():
            for process in (self._command, self._server):
                if process is not None and process.pid == pid:
                    process.is_reaped = True
                    process.status = code if code >= 0 else 128 - code  # as in shells
                    self._set_ended(process)
        server = self._server
        if server is not None and not server.has_ended and server.is_gone():
            self._set_ended(server)

    def _set_ended(self, process: _Process) -> None:
        process.has_ended, self._ended = True, time.monotonic()


def _is_trusted(ancillary: Sequence[tuple[int, int, bytes]]) -> bool:
    """Whether a message is from this container, which may share its network, and from our user."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, user, _ = _CREDENTIALS.unpack(data)
            return pid > 0 and (user == os.geteuid() or 0 in (user, os.geteuid()))
    return False


def _ended_children() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)
