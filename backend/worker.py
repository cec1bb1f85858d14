"""The worker process: read a message, do it, answer; end when the frontend closes the connection.

One process serves one model with one batch at a time, blocking, single-threaded as far as this file
goes. Once it is loaded, a handler that is a coroutine is served by `backend.async_worker`, and one
whose stages overlap by `backend.pipeline`. The frontend learns of the worker's end by EOF,
whatever the reason; exit status 0 says "the frontend left", 1 "the model did not load" or "the
connection broke". Everything else is the handler's doing (``sys.exit``, a signal, a segfault).

`WorkerSetup` crosses from the frontend to its own child by multiprocessing; after that only frames
do. A worker in another interpreter begins in `backend.processes.bootstrap` and comes here too.
"""

import faulthandler
import functools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn, TextIO

from marserve.backend.connection import FrontendConnection
from marserve.backend.errors import HandlerUnusable, load_status, sentence_of
from marserve.backend.loader import Run, load_service
from marserve.backend.profiling.batch_sizes import profile_model
from marserve.backend.protocol import Load, ProtocolError, Reply
from marserve.backend.service import Service

logger = logging.getLogger(__name__)

# Mistakes in the author's code: the next try would meet them again.
_PERMANENT = (ImportError, SyntaxError, HandlerUnusable)
_STDERR = 2


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """Where and how a worker works, whoever started its process.

    Attributes:
        python_path: Put in front of ``sys.path``, in this order.
        model_dir: Working directory.
        threads: Intra-op threads for torch and OpenMP; 0 leaves them as they are.
        stacks: File for the stacks of a crash (`record_stacks`).
        terminal_of: Process id of the server whose terminal it shares, for its handler is debugged;
            0 for none.
    """

    python_path: tuple[str, ...]
    model_dir: str
    threads: int
    stacks: str = ""
    terminal_of: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerSetup(WorkerPlace):
    """What a child of multiprocessing needs before it can speak.

    The pipes are the write ends of what become its file descriptors 1 and 2; ``environment`` is its
    whole environment.
    """

    sock: socket.socket
    stdout: Connection
    stderr: Connection
    environment: Mapping[str, str]


def main(setup: WorkerSetup) -> NoReturn:
    """Run the worker in a child of multiprocessing."""
    if not setup.terminal_of:
        os.setsid()  # a process group of its own: killed with all its children, deaf to Ctrl-C
    for pipe, fd in ((setup.stdout, 1), (setup.stderr, 2)):
        os.dup2(pipe.fileno(), fd)
        pipe.close()
    os.environ.clear()
    os.environ.update(setup.environment)
    run(setup, FrontendConnection(setup.sock))


def run(place: WorkerPlace, connection: FrontendConnection) -> NoReturn:
    """Make this process the worker, until its connection closes."""
    _become_worker(place)
    print(f"[PID]{os.getpid()}")  # noqa: T201 - lines that operators of TorchServe grep
    print("Torch worker started.")  # noqa: T201
    print(f"Python runtime: {sys.version.split()[0]}")  # noqa: T201
    sys.exit(_serve(connection, place.terminal_of))


def _become_worker(place: WorkerPlace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if place.terminal_of:
        from marserve.backend.debugging import take_terminal

        take_terminal()
    sys.stdout, sys.stderr = _line_buffered(1), _line_buffered(2)
    enter_model(place)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s", force=True)
    record_stacks(place.stacks)


def enter_model(place: WorkerPlace) -> None:
    """Have this process import from the model's directory, and work there.

    What the operator has put on PYTHONPATH goes before the archive, as under TorchServe.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    operators = [entry for entry in entries if entry and entry not in place.python_path]
    sys.path[:0] = [*operators, *place.python_path]
    os.chdir(place.model_dir)
    _limit_threads(place.threads)


def _line_buffered(fd: int) -> TextIO:
    """A pipe is block-buffered by default; a log wants its lines when they are written."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _limit_threads(threads: int) -> None:
    if not threads:
        return
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # read when the libraries load
        os.environ.setdefault(name, str(threads))
    torch = sys.modules.get("torch")  # loaded already in a child of the fork server
    if torch is not None:
        torch.set_num_threads(threads)


def _serve(connection: FrontendConnection, terminal_of: int = 0) -> int:
    """Load the model and answer batches until the frontend leaves; returns the exit status."""
    try:
        load = connection.receive()
        if load is None:
            pass
        elif not isinstance(load, Load):
            logger.error("%s came before a model was loaded.", type(load).__name__)
            return 1
        elif terminal_of:
            from marserve.backend.debugging import serve_debugged

            serve_debugged(connection, load, terminal_of)
        elif load.asynchronous:
            return _serve_concurrently(connection, load)
        elif (service := _load(connection, load)) is None:
            return 1
        elif service.stages is None:
            _predict(connection, service)
        else:
            from marserve.backend.pipeline import serve_in_stages  # no other worker needs threads

            logger.info("The stages of successive batches overlap.")
            serve_in_stages(connection, service, connection.reply)
    except (ProtocolError, ConnectionError):
        logger.exception("Backend worker process died.")
        return 1
    except SystemExit:
        logger.exception("The handler has ended its process.")  # else nobody learns where
        raise
    logger.info("Frontend disconnected.")
    return 0


def _predict(connection: FrontendConnection, service: Service) -> None:
    """Answer one batch after the other."""
    while (batch := connection.receive_batch()) is not None:
        send = functools.partial(connection.reply, batch.number)
        send(service.predict(batch.inputs, send, batch.run_as))


def _serve_concurrently(connection: FrontendConnection, load: Load) -> int:
    # Here, because no other worker needs asyncio.
    from marserve.backend.async_worker import new_loop, serve_concurrently

    loop = new_loop()
    service = _load(connection, load, loop.run_until_complete)
    return 1 if service is None else serve_concurrently(loop, connection.detach(), service)


def _load(connection: FrontendConnection, load: Load, run: Run | None = None) -> Service | None:
    """Load the model and tell the frontend; None if it cannot be."""
    logger.info("model_name: %s, batchSize: %d", load.model_name, load.batch_size)
    started = time.perf_counter()
    try:
        service = load_service(load, run)
    except Exception as error:  # foreign code
        reason = sentence_of(error)
        logger.exception("Load model failed: %s, error: %s", load.model_name, reason)
        connection.send(Reply(load_status(error), reason, permanent=isinstance(error, _PERMANENT)))
        return None
    logger.info("Model %s loaded in %.3f s.", load.model_name, time.perf_counter() - started)
    reply = Reply(message=f"loaded model {load.model_name}", overlaps=service.stages is not None)
    if load.profiled_sizes:
        found = profile_model(load, service)
        reply.costs, reply.too_large = found.costs, found.too_large
        reply.profiling_note = found.note
    if service.poison:  # no reply: the frontend blames the samples, and does not ask for it again
        logger.error("Trying out batches has poisoned this process: %s", service.poison)
        return None
    reply.metrics = service.take_metrics()
    connection.send(reply)
    return service


def record_stacks(path: str) -> None:
    """Have the stacks of all threads appended to a file, after a fatal signal and at SIGQUIT.

    A file and not standard error, which belongs to the handler: whoever reads it need not guess
    which lines are the stack. The frontend keeps it in memory and opens it by a path, so that a
    child, a command and the ranks of a runner all find it in the same way. SIGQUIT asks for the
    stacks and changes nothing else, as in Java's virtual machines.

    Standard error gets them where there is no path, or it cannot be opened; and those of children
    that a handler forks, which are not the worker's.
    """
    descriptor = _STDERR
    if path:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            logger.info("The stack of a crash will be on standard error: %s", error)
    _write_stacks_to(descriptor)
    os.register_at_fork(after_in_child=functools.partial(_write_stacks_to, _STDERR))


def _write_stacks_to(descriptor: int) -> None:
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGQUIT, descriptor)
