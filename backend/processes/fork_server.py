"""The fork server: a process that has imported what workers need, and forks them.

The frontend starts it by a command line and speaks to it by a socket that keeps the bounds of
messages (JSON). It is asked one thing at a time and answers in order:

* nothing at first: that its imports are done;
* four descriptors: to fork a worker, which gets them as its socket, its standard output and error,
  and where it reads its `WorkerSetup`, up to the end. The answer is its process id, with a
  descriptor that is readable when it has ended;
* a process id: to reap that worker, which has ended or is about to; the answer is its exit status.

It reaps nobody unasked, so that the id of a worker stays its own until the frontend knows of its
end. It ends when the frontend has closed the socket; its workers do not end with it.

Workers share its memory for as long as nobody writes to it, and the collector writes to every
object that is not frozen: a worker's first full collection made 60 MB its own.
"""

import contextlib
import errno
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from marserve.backend.connection import FrontendConnection
from marserve.backend.processes.bootstrap import NOTHING_FROM_HERE
from marserve.backend.worker import WorkerPlace, run

_MAX_REQUEST_BYTES = 64
_DESCRIPTORS = 4
# Sandboxes that do not know the call.
_NO_PIDFDS = (errno.ENOSYS, errno.EPERM)


@dataclass(frozen=True, kw_only=True)
class WorkerSetup(WorkerPlace):
    """What a forked worker needs besides its descriptors; ``environment`` is its whole one."""

    environment: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """As it is sent to the worker."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "WorkerSetup":
        """The reverse of `to_bytes`."""
        members = json.loads(data)
        return cls(**{**members, "python_path": tuple(members["python_path"])})


def command(python: str, sock: int, modules: Sequence[str]) -> list[str]:
    """The command line of a fork server; ``sock`` is the descriptor of its end of the socket."""
    code = f"{NOTHING_FROM_HERE}from {__name__} import main; main()"
    return [python, "-c", code, str(sock), ",".join(modules)]


def main() -> NoReturn:
    """Run the fork server."""
    modules, descriptor = sys.argv.pop(), sys.argv.pop()
    os.set_inheritable(int(descriptor), False)
    for number in (signal.SIGINT, signal.SIGTERM):  # of a whole group: the frontend's to obey
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(descriptor)) as sock, contextlib.suppress(ConnectionError):
        _preload(filter(None, modules.split(",")))
        _answer(sock, {})
        _serve(sock)
    sys.exit(0)


def _preload(names: Iterable[str]) -> None:
    """Import modules; missing ones are skipped, and failing ones reported on stderr."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a worker that needs it will tell, others live
            if not isinstance(error, ModuleNotFoundError) or error.name != name:
                print(f"{name} is not preloaded: {error}", file=sys.stderr)  # noqa: T201
    gc.collect()
    gc.freeze()


def _serve(sock: socket.socket) -> None:
    while True:  # no deadline: it has nothing else to do, and sees the frontend's end as EOF
        request, descriptors, _, _ = socket.recv_fds(
            sock, _MAX_REQUEST_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not request:
            return
        try:
            if len(descriptors) == _DESCRIPTORS:
                pid, sentinel = _fork(sock, descriptors)
                _answer(sock, {"pid": pid}, sentinel)
            else:
                _, status = os.waitpid(int(request), 0)
                _answer(sock, {"status": os.waitstatus_to_exitcode(status)})
        except (OSError, ValueError) as error:
            _answer(sock, {"error": str(error)})
        finally:
            for each in descriptors:
                os.close(each)


def _answer(sock: socket.socket, answer: Mapping[str, Any], *descriptors: int) -> None:
    try:
        socket.send_fds(sock, [json.dumps(answer).encode()], descriptors)
    finally:
        for each in descriptors:
            os.close(each)


def _fork(sock: socket.socket, descriptors: Sequence[int]) -> tuple[int, int]:
    """Fork a worker; returns its process id, and a descriptor that is readable when it has ended.

    Where there are no pidfds it is the end of a pipe that the worker holds, and that children which
    it has forked may hold a little longer.
    """
    reader, writer = os.pipe()
    try:
        pid = os.fork()
        if not pid:
            os.close(reader)
            sock.close()
            _work(descriptors)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        sentinel = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_PIDFDS:
            return pid, reader
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    os.close(reader)
    return pid, sentinel


def _work(descriptors: Sequence[int]) -> NoReturn:
    """Be the worker, to the end of this process."""
    status = 1
    try:
        _begin(*descriptors)
    except SystemExit as end:
        status = _status(end.code)
    except BaseException:  # noqa: BLE001 - what the interpreter would do
        traceback.print_exc()
    finally:
        _leave(status)


def _begin(sock: int, stdout: int, stderr: int, told: int) -> NoReturn:
    with open(told, "rb") as file:
        data = file.read()  # the frontend has a deadline, and closes it
    if not data:
        sys.exit(1)  # it has given up
    setup = WorkerSetup.from_bytes(data)
    if not setup.terminal_of:
        os.setsid()  # an own process group: killed with all its children, not reached by Ctrl-C
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(setup.environment)
    run(setup, FrontendConnection(socket.socket(fileno=sock)))


def _status(code: object) -> int:
    """What the interpreter makes of the argument of `sys.exit`."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)  # noqa: T201
    return 1


def _leave(status: int) -> NoReturn:
    """End the worker, with what the interpreter waits for, but without taking itself apart.

    With torch imported, that takes half a second.
    """
    try:
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()
            child.join()  # no deadline, nor for threads: the frontend has one for the process
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status & 0xFF)
