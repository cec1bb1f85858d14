"""The first process of a container: ``marserve-init COMMAND``. The container ends with the server.

TorchServe's image runs a shell script that starts a detached server and then waits for ever
(``tail -f /dev/null``), and so do the scripts of its users. There the signal to stop ends nothing,
as the kernel keeps from a first process what it does not handle, and a container whose server is
dead lives on. With this program before them such scripts stay as they are:

* The server or its starter says which process it is, by the protocol of sd_notify(3), as systemd
  would be told (`service_manager`). So nothing of the command has to be understood.
* When the server has ended, this program ends with its status, and the kernel ends the rest of the
  container. Where there is no server, it ends with the command.
* A command that fails behind the start of the server ends the server, too.
* SIGTERM and SIGINT go to the server, which finishes what it has accepted, and to the command.
* Processes that have lost their parents are reaped.

``torchserve`` and ``marserve`` put it before themselves where they are the first process.
"""

import contextlib
import errno
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from marserve.backend.processes.runner import become_subreaper
from marserve.frontend.lifecycle.service_manager import SOCKET_VARIABLE, ServiceManager

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_PASSED_ON = (*_STOPS, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT)
# A server that was stopped may be started again by the command, within this time.
_RESTART_SECONDS = 3.0
_PID = re.compile("[1-9][0-9]{0,8}")  # more is none, nor a number that the kernel takes
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_MESSAGE_BYTES = 1 << 16
_MAX_MESSAGES = 100  # at a time: signals and ends shall not wait for them
_NOT_FOUND, _NOT_EXECUTABLE, _USAGE = 127, 126, 2


def main() -> int:
    """Run the command of the arguments; returns the exit status."""
    if len(sys.argv) == 1:
        print("usage: marserve-init COMMAND [ARGUMENT ...]", file=sys.stderr)  # noqa: T201
        return _USAGE
    return supervise(sys.argv[1:])


def supervise(command: Sequence[str]) -> int:
    """Run a command, and end as the server that it starts; returns the exit status."""
    try:
        return _Init(command).run()
    except (FileNotFoundError, PermissionError) as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


@dataclass
class _Process:
    """One that we look after."""

    pid: int
    pidfd: int = -1  # where there are none, others' children are seen to end with the next of ours
    has_ended: bool = False
    status: int | None = None  # its exit status; stays None if it is not our child

    def send(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it is gone, or somebody else's
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)
            elif not self.has_ended:
                os.kill(self.pid, number)

    def is_gone_without_pidfd(self) -> bool:
        """Whether another's child has ended, where only asking tells."""
        if self.pidfd < 0:
            try:
                os.kill(self.pid, 0)
            except OSError as error:
                return error.errno == errno.ESRCH
        return False

    def shares_our_terminal(self) -> bool:
        """Whether it gets the signals that are typed, as we do."""
        with contextlib.suppress(OSError):
            return os.isatty(0) and os.getpgid(self.pid) == os.getpgrp()
        return False


class _Init:
    def __init__(self, command: Sequence[str]) -> None:
        with contextlib.suppress(OSError):  # orphans are ours anyway where we are the first
            become_subreaper()
        self._outer = ServiceManager.taken_from(os.environ)  # of the container, if that has any
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        name = f"marserve-init-{os.urandom(8).hex()}"
        self._listener.bind(f"\0{name}")
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake)
        for number in (*_PASSED_ON, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self._server: _Process | None = None
        self._said_stopping = False
        self._is_asked_to_stop = False
        self._failure: int | None = None  # of the command behind the start of the server
        self._ended = 0.0  # when the server has
        environment = {**os.environ, SOCKET_VARIABLE: f"@{name}"}
        ignored_by_python = [signal.SIGPIPE, signal.SIGXFSZ]
        self._command = _Process(
            os.posix_spawnp(command[0], list(command), environment, setsigdef=ignored_by_python)
        )

    def run(self) -> int:
        while (status := self._outcome()) is None:
            self._wait()
            # First: who ends from now on wakes us again.
            signals = self._signals()
            self._hear()  # before ends: who said something may have ended since
            self._reap()
            for number in signals:
                self._pass_on(number)
        return status

    def _outcome(self) -> int | None:
        """The status to end with; None as long as it goes on."""
        command, server = self._command, self._server
        if server is None:
            return command.status
        if not server.has_ended:
            if command.status and not self._is_asked_to_stop:
                self._failure, self._is_asked_to_stop = command.status, True
                server.send(signal.SIGTERM)
            return None
        may_go_on = not (self._is_asked_to_stop or server.status or command.has_ended)
        return None if may_go_on and self._restart_seconds() > 0 else self._status_of(server)

    def _status_of(self, server: _Process) -> int:
        if self._failure is not None:
            return self._failure
        if server.status is not None:
            return server.status
        # A child of the command, which knows better, unless the signal to stop has ended that, too.
        known = None if self._is_asked_to_stop else self._command.status
        return known or int(not self._said_stopping)

    def _restart_seconds(self) -> float:
        return self._ended + _RESTART_SECONDS - time.monotonic()

    def _wait(self) -> None:
        poll, server = select.poll(), self._server
        poll.register(self._woken, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        seconds = None  # no deadline: it is for this that it is here
        if server is not None and server.has_ended:
            seconds = max(0.0, self._restart_seconds())
        elif server is not None and server.pidfd >= 0:
            poll.register(server.pidfd, select.POLLIN)
        events = poll.poll(None if seconds is None else seconds * 1000)
        if server is not None and server.pidfd in [descriptor for descriptor, _ in events]:
            server.has_ended, self._ended = True, time.monotonic()

    def _signals(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._woken, _MAX_MESSAGE_BYTES)
        return b""

    def _pass_on(self, number: int) -> None:
        if number not in _PASSED_ON:
            return
        is_stop = number in _STOPS
        self._is_asked_to_stop |= is_stop
        told = [self._server] if self._server is not None and not self._server.has_ended else []
        if not told or (is_stop and told[0].pid != self._command.pid):
            told.append(self._command)
        for process in told:
            if not (number in _OF_TERMINALS and process.shares_our_terminal()):
                process.send(number)

    def _hear(self) -> None:
        for _ in range(_MAX_MESSAGES):
            try:
                message, ancillary, _, _ = self._listener.recvmsg(
                    _MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                return
            if _is_trusted(ancillary):
                self._understand(message.decode(errors="replace").splitlines())

    def _understand(self, lines: Sequence[str]) -> None:
        for line in lines:
            key, _, value = line.partition("=")
            if key == "MAINPID" and _PID.fullmatch(value) and int(value) != os.getpid():
                self._adopt(int(value))
            self._said_stopping |= line == "STOPPING=1"
        if others := [line for line in lines if not line.startswith("MAINPID=")]:
            self._outer.tell(*others)

    def _adopt(self, pid: int) -> None:
        if self._server is not None:
            if not self._server.has_ended or self._server.pid == pid:
                return
            if self._server.pidfd >= 0:
                os.close(self._server.pidfd)
        self._said_stopping = False
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:
            pidfd = -1
        if pid == self._command.pid:
            self._command.pidfd = pidfd
            self._server = self._command
        else:
            self._server = _Process(pid, pidfd)
        if self._is_asked_to_stop:  # while the command had not come to the start of the server
            self._server.send(signal.SIGTERM)

    def _reap(self) -> None:
        for pid, code in _ended_children():
            for process in (self._command, self._server):
                if process is not None and process.pid == pid:
                    process.status = code if code >= 0 else 128 - code  # as shells say it
                    process.has_ended = True
                    self._ended = time.monotonic()
        server = self._server
        if server is not None and not server.has_ended and server.is_gone_without_pidfd():
            server.has_ended, self._ended = True, time.monotonic()


def _is_trusted(ancillary: Sequence[tuple[int, int, bytes]]) -> bool:
    """Whether a message is of no other container with the same network, and of no other user."""
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
