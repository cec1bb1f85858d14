"""The worker process: loads a model, then answers batches until the frontend closes the connection.

This file serves one batch at a time, with blocking I/O in one thread; `backend.async_worker` serves
handlers that are coroutines, and `backend.pipeline` those whose stages overlap. The frontend sees
any end of the worker as EOF. Exit status 0 means that the frontend closed the connection, 1 that
the model did not load or the connection broke; others are caused by the handler (``sys.exit``, a
signal, a segfault).
"""

import contextlib
import faulthandler
import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self, TextIO

from marserve.backend.connection import FrontendConnection
from marserve.backend.errors import HandlerUnusable, load_status, sentence_of
from marserve.backend.framing import record_reader
from marserve.backend.large_messages import keep_freed_memory
from marserve.backend.loader import Run, load_service
from marserve.backend.processes.module_names import give_way
from marserve.backend.profiling.measurements import Measurements
from marserve.backend.protocol import (
    Compare,
    Compared,
    EndSequence,
    Load,
    LoadFailure,
    LoadStarted,
    Profile,
    Profiled,
    ProtocolError,
    SetThreads,
)
from marserve.backend.service import Service
from marserve.backend.torch_threads import change_threads, set_threads

if TYPE_CHECKING:
    from marserve.backend.debugging import DebuggedModel

logger = logging.getLogger(__name__)

# Mistakes in the author's code: another try would fail in the same way.
_PERMANENT = (ImportError, SyntaxError, HandlerUnusable)
_STDERR = 2
_UNUSABLE = 500  # of a load that another try may repair
_UNFIT = 400  # the model loads, but does not fit its settings
# Thousandths of all memory that the kernel adds to what a process uses, to choose which to kill.
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_MORE, _MOST = 500, 1000


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """What a worker needs from its frontend, however its process was started.

    Attributes:
        python_path: The first entries of ``sys.path``, in this order.
        threads: Intra-op threads for torch and OpenMP; 0 does not change them.
        stacks: The file for the stacks of a crash (`record_stacks`).
        terminal_of: If its handler is debugged, the process id of the server whose terminal it
            shares; else 0.
        environment: Of a forked worker, all variables. Of a new interpreter, those that must not
            affect its start.
    """

    python_path: tuple[str, ...]
    model_dir: str
    threads: int
    stacks: str = ""
    terminal_of: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        """Return the JSON text that `from_text` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Return what `to_text` has written."""
        place: Self = record_reader(cls)(json.loads(text))
        return place


def run(place: WorkerPlace, connection: FrontendConnection) -> NoReturn:
    """Make this process the worker, until its connection closes."""
    failure = _become_worker(place)
    print(f"[PID]{os.getpid()}")  # noqa: T201 - lines that operators of TorchServe grep
    print("Torch worker started.")  # noqa: T201
    print(f"Python runtime: {sys.version.split()[0]}")  # noqa: T201
    if failure:
        sys.exit(_refuse_load(connection, failure))
    sys.exit(_serve(connection, place.terminal_of))


def _become_worker(place: WorkerPlace) -> str:
    """Prepare this process for a model; return why that failed, or an empty text."""
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if place.terminal_of:
        from marserve.backend.debugging import take_terminal

        take_terminal()
    sys.stdout, sys.stderr = _line_buffered(1), _line_buffered(2)
    failure = ""
    try:
        enter_model(place)
    except OSError as error:
        failure = f"The model's directory cannot be entered: {error}"
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s", force=True)
    record_stacks(place.stacks)
    return failure


def import_path(place: WorkerPlace, environment: Mapping[str, str]) -> list[str]:
    """Return the first entries of ``sys.path`` of a worker with an environment.

    The entries of PYTHONPATH go before the archive, as in TorchServe.
    """
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    operators = [entry for entry in entries if entry and entry not in place.python_path]
    return [*operators, *place.python_path]


def enter_model(place: WorkerPlace) -> None:
    """Set import path, working directory and threads of this process for a model."""
    entries = import_path(place, os.environ)
    give_way(entries, place.model_dir)
    sys.path[:0] = entries
    os.chdir(place.model_dir)
    set_threads(place.threads)


def _line_buffered(fd: int) -> TextIO:
    """Open a descriptor line-buffered; pipes are block-buffered by default, which delays logs."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _refuse_load(connection: FrontendConnection, reason: str) -> int:
    with contextlib.suppress(ProtocolError, ConnectionError):
        if isinstance(connection.receive(), Load):
            connection.send(LoadStarted())
            connection.send(LoadFailure(_UNUSABLE, reason))
    logger.error("%s", reason)
    return 1


def _serve(connection: FrontendConnection, terminal_of: int = 0) -> int:
    try:
        load = connection.receive()
        if isinstance(load, Load):
            connection.send(LoadStarted())
        if load is None:
            pass
        elif not isinstance(load, Load):
            logger.error("%s came before a model was loaded.", type(load).__name__)
            return 1
        elif terminal_of:
            from marserve.backend.debugging import debug

            model = debug(connection, load, terminal_of)
            _predict(connection, model, model.run_once)
        elif load.asynchronous:
            return _serve_concurrently(connection, load)
        elif (service := _load(connection, load)) is None:
            return 1
        elif service.stages is None:
            _predict(connection, service, Measurements(load, service).run_once)
        else:
            from marserve.backend.pipeline import serve_in_stages  # other workers need no threads

            logger.info("The stages of successive batches overlap.")
            serve_in_stages(connection, service, Measurements(load, service).compare_once)
    except (ProtocolError, ConnectionError):
        logger.exception("Backend worker process died.")
        return 1
    except SystemExit:
        logger.exception("The handler has ended its process.")  # the traceback shows where
        raise
    logger.info("Frontend disconnected.")
    return 0


def _predict(
    connection: FrontendConnection,
    model: "Service | DebuggedModel",
    measure: Callable[[Profile | Compare], Profiled | Compared],
) -> None:
    while (message := connection.receive_work()) is not None:
        send = functools.partial(connection.reply, message.number)
        if isinstance(message, EndSequence):
            send(model.end_sequence(message))
        elif isinstance(message, Profile | Compare):
            send(measure(message))
        elif isinstance(message, SetThreads):
            send(change_threads(message))
        else:
            send(model.predict(message, send))


def _serve_concurrently(connection: FrontendConnection, load: Load) -> int:
    # Imported here, because other workers do not need asyncio.
    from marserve.backend.async_worker import new_loop, serve_concurrently

    loop = new_loop()
    service = _load(connection, load, loop.run_until_complete)
    if service is None:
        return 1
    return serve_concurrently(loop, connection.detach(), service, load)


@contextlib.contextmanager
def as_first_choice(score: Path = _OOM_SCORE) -> Iterator[None]:
    """Make this process the kernel's first choice during the block, when memory runs out.

    Otherwise the kernel would kill the largest process of the container, mostly a worker of another
    model that serves. It needs no privilege to raise the score and to restore it.
    """
    try:
        before = score.read_text()
        score.write_text(str(min(int(before) + _MORE, _MOST)))
    except (OSError, ValueError):  # there is no /proc, it is read-only, or the file is blank
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            score.write_text(before)


@as_first_choice()
def _load(connection: FrontendConnection, load: Load, run: Run | None = None) -> Service | None:
    logger.info("model_name: %s, batchSize: %d", load.model_name, load.batch_size)
    started = time.perf_counter()
    try:
        service = load_service(load, run)
    except Exception as error:  # foreign code
        reason = sentence_of(error)
        logger.exception("Load model failed: %s, error: %s", load.model_name, reason)
        connection.send(LoadFailure(load_status(error), reason, isinstance(error, _PERMANENT)))
        return None
    logger.info("Model %s loaded in %.3f s.", load.model_name, time.perf_counter() - started)
    loaded = Measurements(load, service).run_trials()
    if service.poison:  # without a reply the frontend blames the samples, and tries without them
        logger.error("Batches of samples have poisoned this process: %s", service.poison)
        return None
    if load.trials.must_validate and (failure := loaded.validation.get("failure")):
        connection.send(LoadFailure(_UNFIT, f"validateBatching: {failure}.", permanent=True))
        return None
    loaded.metrics = service.take_metrics()
    if service.stages is not None:
        loaded.overlaps = service.stages.concurrent_inferences()
    loaded.ends_sequences = load.stateful and service.ends_sequences
    if load.asynchronous:
        loaded.is_cancellable, loaded.is_relay = service.is_cancellable, service.is_relay
    loaded.tensors = service.tensors
    if service.context.describe_compiled is not None:
        loaded.compiled = service.context.describe_compiled()
    loaded.warnings = service.context.load_warnings
    connection.send(loaded)
    return service


def record_stacks(path: str) -> None:
    """Append the stacks of all threads to a file on a fatal signal and on SIGQUIT.

    After SIGQUIT the process continues, as Java's virtual machines do. Stacks are written to
    standard error without a usable path, and in children that a handler forks.
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
    # Python 3.14 adds the stack of C, which would displace Python's in the file.
    only_python = {"c_stack": False} if sys.version_info >= (3, 14) else {}
    faulthandler.enable(descriptor, **only_python)
    faulthandler.register(signal.SIGQUIT, descriptor)
