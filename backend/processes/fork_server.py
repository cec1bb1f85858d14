"""The fork server: a process that has imported what workers need, and forks them.

The frontend starts it by a command line and uses a socket that preserves the bounds of messages
(JSON). Requests are answered in order:

* none: the first answer is sent when the imports are done;
* four descriptors: fork a worker, which gets them as its socket, its standard output and error, and
  for its `WorkerPlace`, which it reads to the end. The answer is its process id, with a descriptor
  that is readable when it has ended;
* a process id: reap that worker, which has ended or is about to; the answer is its exit status.

Workers are only reaped on request, so that a process id is not reused before the frontend has
noticed its end. The fork server ends when the frontend has closed the socket; workers do not.

Workers share its memory until they write to it. The garbage collector writes to all objects that
are not frozen: without freezing, a worker's first full collection copied 60 MB.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any, NamedTuple, NoReturn, TypeAlias

from marserve.backend.connection import FrontendConnection
from marserve.backend.processes.bootstrap import NOTHING_FROM_HERE, restart
from marserve.backend.processes.module_names import hidden_names
from marserve.backend.processes.random_state import find_generators, seed
from marserve.backend.worker import WorkerPlace, import_path, run

Finalizer: TypeAlias = "weakref.finalize[Any, Any]"

#: The variable by whose value the frontend finds the processes of a worker; its value here.
WORKER = "MARSERVE_WORKER"
NO_WORKER = "0" * 32

_MAX_REQUEST_BYTES = 64
_DESCRIPTORS = 4
# In sandboxes without the system call.
_NO_PIDFDS = (errno.ENOSYS, errno.EPERM)


def command(python: str, sock: int, modules: Sequence[str]) -> list[str]:
    """Return the command line of a fork server; ``sock`` is the descriptor of its socket."""
    code = f"{NOTHING_FROM_HERE}from {__name__} import main; main()"
    return [python, "-c", code, str(sock), ",".join(modules)]


def main() -> NoReturn:
    """Run the fork server, or in a process that it has forked the worker."""
    leave = _Leave()
    atexit.register(leave)  # the first to be registered is called last
    modules, descriptor = sys.argv.pop(), sys.argv.pop()
    os.set_inheritable(int(descriptor), False)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the group, for the frontend
        signal.signal(number, signal.SIG_IGN)
    descriptors: Sequence[int] = ()
    inherited = _Inherited()
    with socket.socket(fileno=int(descriptor)) as sock, contextlib.suppress(ConnectionError):
        inherited = _preload(filter(None, modules.split(",")))
        # One tracker for all workers, which outlives them and removes shared memory of handlers.
        # That of a worker would be killed with it, and a marked one with the server.
        os.environ.pop("MARSERVE_WORKDIR", None)
        resource_tracker.ensure_running()
        _answer(sock, {})
        descriptors = _serve(sock)
    try:
        if descriptors:
            seed(inherited.generators)
            _work(*descriptors)
        _set_atexit(inherited.finalizers, enabled=True)
        sys.exit(0)
    except SystemExit as end:
        leave.status = end.code or 0 if isinstance(end.code, int | None) else 1
        raise


class _Inherited(NamedTuple):
    """What preloaded modules have made, and workers must treat.

    They must not call finalizers, which would remove directories that all workers use; torch's
    alone would copy 30 MB in each. They seed the generators of random numbers.
    """

    finalizers: Sequence[Finalizer] = ()
    generators: Sequence[Any] = ()


def _preload(names: Iterable[str]) -> _Inherited:
    """Import modules; missing ones are skipped, and failing ones reported on stderr."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a worker that needs it will fail
            if not isinstance(error, ModuleNotFoundError) or error.name != name:
                print(f"{name} is not preloaded: {error}", file=sys.stderr)  # noqa: T201
    gc.collect()
    objects = gc.get_objects()
    inherited = _Inherited(_finalizers_of(objects), find_generators(objects))
    del objects
    _set_atexit(inherited.finalizers, enabled=False)
    gc.freeze()
    return inherited


def _finalizers_of(objects: Iterable[Any]) -> Sequence[Finalizer]:
    callbacks = (each.__callback__ for each in objects if type(each) is weakref.ref)
    return [each for each in callbacks if isinstance(each, weakref.finalize)]


def _set_atexit(finalizers: Iterable[Finalizer], *, enabled: bool) -> None:
    for each in finalizers:
        each.atexit = enabled


def _serve(sock: socket.socket) -> Sequence[int]:
    """Answer requests until the frontend has closed the socket.

    In each forked worker it returns the worker's descriptors, and the one that `_fork` returns.
    """
    while True:  # no deadline: the frontend's end is EOF
        request, descriptors, _, _ = socket.recv_fds(
            sock, _MAX_REQUEST_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not request:
            return ()
        with contextlib.ExitStack() as received:
            for each in descriptors:
                received.callback(os.close, each)
            try:
                if len(descriptors) == _DESCRIPTORS:
                    pid, sentinel = _fork()
                    if not pid:
                        received.pop_all()
                        return [*descriptors, sentinel]
                    _answer(sock, {"pid": pid}, sentinel)
                else:
                    _, status = os.waitpid(int(request), 0)
                    _answer(sock, {"status": os.waitstatus_to_exitcode(status)})
            except (OSError, ValueError) as error:
                _answer(sock, {"error": str(error)})


def _answer(sock: socket.socket, answer: Mapping[str, Any], *descriptors: int) -> None:
    try:
        socket.send_fds(sock, [json.dumps(answer).encode()], descriptors)
    finally:
        for each in descriptors:
            os.close(each)


def _fork() -> tuple[int, int]:
    """Fork a worker; return its process id, and a descriptor that is readable when it has ended.

    Without pidfds that descriptor is the end of a pipe whose other end the worker holds, and its
    children, which may end later. In the worker it returns 0 and that other end.
    """
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if not pid:
        os.close(reader)
        return 0, writer
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


def _work(sock: int, stdout: int, stderr: int, setup_reader: int, alive: int) -> NoReturn:
    with open(setup_reader, "rb") as file:
        data = file.read()  # the frontend closes it, at the latest after its deadline
    if not data:
        sys.exit(1)  # the deadline is over
    place = WorkerPlace.from_text(data)
    if not place.terminal_of:
        os.setsid()  # a process group, which is killed as a whole and not reached by Ctrl-C
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    if hidden := hidden_names(import_path(place, place.environment)):
        print(  # noqa: T201
            "The worker starts in an interpreter of its own, since the model has modules with the "
            f"names of preloaded ones: {', '.join(sorted(hidden))}",
            flush=True,
        )
        os.set_inheritable(alive, True)
        restart(place, sock)
    _mark(place.environment)
    os.environ.clear()
    os.environ.update(place.environment)
    run(place, FrontendConnection(socket.socket(fileno=sock)))


def _mark(environment: Mapping[str, str]) -> None:
    """Write the variable `WORKER` into the memory that /proc shows, which forks copy."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(WORKER.encode())
    if place and ctypes.string_at(place) == NO_WORKER.encode():
        ctypes.memmove(place, environment[WORKER].encode(), len(NO_WORKER))


class _Leave:
    """Ends the process before the interpreter is finalized, which takes 0.5 s with torch.

    Before that, as usual, threads that are not daemons are joined, executors and children of
    multiprocessing end, and the functions of ``atexit`` are called.
    """

    status = 1

    def __call__(self) -> NoReturn:
        try:
            logging.shutdown()  # registered before this
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(self.status & 0xFF)
