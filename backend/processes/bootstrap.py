"""The entry point of workers whose interpreter is started by a command line.

Three kinds of processes start here:

* a worker in another interpreter than the frontend's, which inherits its socket;
* a *runner*: torchrun, or torch's launcher for CPUs. Such a program starts the processes of one
  worker without inheritance, so they fetch their sockets at an address (`backend.processes.runner`)
  in their arguments;
* a process that a runner started.

The `WorkerConfig` is an argument: it is small, contains no secrets, and is shown by ``ps``. No
module of the model must be imported too early (its ``json.py`` instead of the library's): the
working directory, which ``-c`` puts first on ``sys.path``, is removed, and PYTHONPATH set later.
"""

import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from marserve.backend.connection import FrontendConnection
from marserve.backend.processes.ranks import connection_of
from marserve.backend.processes.runner import (
    FirstFailure,
    die_with_parent,
    fetch_sockets,
    offer_sockets,
)
from marserve.backend.worker import WorkerPlace, run

#: Prefix of the code of ``python -c``: nothing is imported from the working directory.
NOTHING_FROM_HERE = "import sys; sys.path[:1] == [''] and sys.path.pop(0); "


@dataclass(frozen=True)
class Runner:
    """A module that, run as a program, starts the processes of one worker.

    Attributes:
        processes: How many it starts; ``LOCAL_RANK`` is the number of each.
        to_all: Whether all of them take part in each batch, or the first only.
        meets_itself: Whether it is torchrun without partners on other machines. Its rendezvous is
            then a file in memory that other processes cannot open: the content is unpickled, and
            the store used otherwise listens on all interfaces without authentication.
    """

    module: str
    arguments: tuple[str, ...]
    processes: int = 1
    to_all: bool = False
    meets_itself: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(WorkerPlace):
    """The place of a new process, an argument of its command line.

    Attributes:
        sock: Descriptor of its end of the socket pair; -1 if it has to be fetched.
        runner: The program to run instead of a worker.
    """

    sock: int
    runner: Runner | None = None


def command(python: str, config: WorkerConfig) -> list[str]:
    """Return the command line of a process with a config."""
    return _command(python, main, config.to_text())


def environment_at_start(
    environment: Mapping[str, str], python_path: Sequence[str]
) -> dict[str, str]:
    """Return a worker's environment without the model's entries of PYTHONPATH, which `main` adds.

    A module of the model must not be imported while the interpreter starts.
    """
    started = dict(environment)
    entries = started.pop("PYTHONPATH", "").split(os.pathsep)
    inherited = [entry for entry in entries if entry and entry not in python_path]
    if inherited:
        started["PYTHONPATH"] = os.pathsep.join(inherited)
    return started


def environment_after_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a worker's environment that `main` sets."""
    path = environment.get("PYTHONPATH")
    return {} if path is None else {"PYTHONPATH": path}


def restart(place: WorkerPlace, sock: int) -> NoReturn:
    """Replace the program of this process by a worker in an interpreter of its own.

    ``sock`` is the descriptor of its socket; only descriptors that are inheritable stay open.
    """
    os.set_inheritable(sock, True)
    later = environment_after_start(place.environment)
    config = WorkerConfig(**{**vars(place), "environment": later}, sock=sock)
    arguments = command(sys.executable, config)
    start = environment_at_start(place.environment, place.python_path)
    os.execve(arguments[0], arguments, start)  # noqa: S606 - this very interpreter


def probe(python: str) -> list[str]:
    """Return the command line that checks whether an interpreter can run workers."""
    return [python, "-c", f"{NOTHING_FROM_HERE}import ts, {__name__}"]


def as_program(module: str, *arguments: str) -> list[str]:
    """Return arguments of an interpreter like ``-m``, without the working directory."""
    code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return ["-c", f"{NOTHING_FROM_HERE}{code}", *arguments]


def _command(python: str, entry: Callable[[], NoReturn], argument: str) -> list[str]:
    code = f"{NOTHING_FROM_HERE}from {__name__} import {entry.__name__} as go; go()"
    return [python, "-c", code, argument]


def main() -> NoReturn:
    """Run a process that the frontend started."""
    config = WorkerConfig.from_text(_argument())
    os.set_inheritable(config.sock, False)
    sock = socket.socket(fileno=config.sock)
    if config.runner is None:
        _work(config, FrontendConnection(sock))
    _become(config.runner, config, sock)


def join() -> NoReturn:
    """Run a process that a runner started."""
    die_with_parent()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    text, sockets = fetch_sockets(_argument(), rank)
    config = WorkerConfig.from_text(text)
    assert config.runner is not None
    _work(config, connection_of(rank, sockets, to_all=config.runner.to_all))


def _argument() -> str:
    return sys.argv.pop()  # handlers may read the arguments


def _work(config: WorkerConfig, connection: FrontendConnection) -> NoReturn:
    os.environ.update(config.environment)
    run(config, connection)


def _become(runner: Runner, config: WorkerConfig, sock: socket.socket) -> NoReturn:
    failure = FirstFailure()
    address = offer_sockets(config.to_text(), sock, runner.processes, failure.watch)
    sys.path.extend(config.python_path)  # last: torch may be a package of the model
    sys.argv = [*_arguments(runner), *_command(sys.executable, join, address)]
    try:
        runpy.run_module(runner.module, run_name="__main__", alter_sys=True)
    except Exception:  # noqa: BLE001 - a runner raises if its processes fail
        traceback.print_exc()
        sys.stderr.flush()
        failure.exit_alike()
        sys.exit(1)
    sys.exit(0)


def _arguments(runner: Runner) -> Sequence[str]:
    meeting = []
    if runner.meets_itself:  # the descriptor stays open
        meeting.append(f"--rdzv-endpoint=/proc/self/fd/{os.memfd_create('rendezvous')}")
    return (runner.module, *meeting, *runner.arguments, "--no-python")
