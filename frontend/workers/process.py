"""One worker as an operating system process: start it, read its lines, see it end, kill its group.

Processes come from multiprocessing's fork server, which has torch imported already, so that
starting or replacing a worker costs little more than loading its weights; ``spawn`` gives every
worker a fresh interpreter instead (some libraries dislike fork). The frontend itself never forks:
its descriptors would leak into the child.

`Process.start` blocks until the fork server has done its imports, so it happens in a thread; the
end of a process is seen through the descriptor of its sentinel.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, BinaryIO

from marserve.backend.worker import WorkerSetup, main

logger = logging.getLogger(__name__)
model_log = logging.getLogger("MODEL_LOG")

Context = ForkServerContext | SpawnContext

# A progress bar without newlines would otherwise be gathered for ever.
_LONGEST_LINE_BYTES = 64 * 1024


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process is started with.

    Attributes:
        name: Appears in the model log, e.g. ``W-9000-resnet-152_1.0``.
        environment: Its whole environment.
        python_path: Put in front of ``sys.path``.
        model_dir: Its working directory.
        threads: Intra-op threads of torch and OpenMP; 0 leaves the libraries' own choice.
    """

    name: str
    environment: Mapping[str, str]
    python_path: tuple[str, ...]
    model_dir: str
    threads: int


class Launcher:
    """Starts worker processes by one start method.

    Processes are started one after the other, by a thread. What is cancelled while it waits for its
    turn never begins; a process nobody wants any more ends when its wire is closed.

    Args:
        method: ``forkserver`` or ``spawn``.
        preload: Modules the fork server imports once for all workers; missing ones are skipped.
    """

    def __init__(self, method: str = "forkserver", preload: Sequence[str] = ()) -> None:
        self._context: Context
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launcher")
        if method == "forkserver":
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(["marserve.backend.worker", *preload])
        else:
            self._context = multiprocessing.get_context("spawn")

    def warm_up(self) -> None:
        """Start the fork server, so that its imports run while the server goes on starting."""
        if isinstance(self._context, ForkServerContext):
            self._thread.submit(forkserver.ensure_running)

    async def start(self, spec: WorkerSpec) -> "WorkerProcess":
        """Start a process; its wire and its output are connected.

        Raises:
            OSError: The process could not be started.
        """
        starting = self._thread.submit(_start, self._context, spec)
        try:
            return WorkerProcess(spec.name, await asyncio.wrap_future(starting))
        except asyncio.CancelledError:
            if not starting.cancel():
                starting.add_done_callback(_abandon)
            raise

    def close(self) -> None:
        """End the fork server and the thread. The workers must have ended."""
        if isinstance(self._context, ForkServerContext):
            self._thread.submit(_end_fork_server)
        self._thread.shutdown(wait=True)


@dataclass(frozen=True)
class _Started:
    process: BaseProcess
    wire: socket.socket
    stdout: BinaryIO
    stderr: BinaryIO

    def close(self) -> None:
        self.wire.close()
        self.stdout.close()
        self.stderr.close()


def _start(context: Context, spec: WorkerSpec) -> _Started:
    """Start the process; the child's ends are closed here whatever happens."""
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        wire, their_wire = socket.socketpair()
        ours.callback(wire.close)
        theirs.callback(their_wire.close)
        readers, writers = [], []
        for _ in range(2):
            reader, writer = os.pipe()
            readers.append(ours.enter_context(os.fdopen(reader, "rb", buffering=0)))
            writers.append(theirs.enter_context(Connection(writer, readable=False)))
        setup = WorkerSetup(
            wire=their_wire,
            stdout=writers[0],
            stderr=writers[1],
            environment=spec.environment,
            python_path=spec.python_path,
            model_dir=spec.model_dir,
            threads=spec.threads,
        )
        # Not a daemon in multiprocessing's sense: handlers may start processes of their own.
        process = context.Process(target=main, args=(setup,), name=spec.name)
        process.start()
        ours.pop_all()
        return _Started(process, wire, readers[0], readers[1])


def _abandon(starting: "Future[_Started]") -> None:
    """Nobody wants the process any more; without its wire it ends by itself."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


def _end_fork_server() -> None:
    """End it now, so that nobody finds it when we are gone.

    By itself it ends at the EOF of a pipe that the daemons of a handler may have inherited, and
    hold open for ever. It has nothing to tidy up. The library has no public way.
    """
    server: Any = forkserver._forkserver  # noqa: SLF001
    pid = server._forkserver_pid  # noqa: SLF001
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server._stop()  # noqa: SLF001


class WorkerProcess:
    """A running worker.

    Attributes:
        pid: Its process id, which is also the id of its process group.
        wire: Our end of the socket pair; whoever takes it closes it.
    """

    def __init__(self, name: str, started: _Started) -> None:
        assert started.process.pid is not None
        self.name = name
        self.pid: int = started.process.pid
        self.wire = started.wire
        self._process = started.process
        self._sentinel = started.process.sentinel
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._sentinel, self._on_end)
        self._outputs = [
            _Output(started.stdout, logging.INFO, f"{name}-stdout"),
            _Output(started.stderr, logging.WARNING, f"{name}-stderr"),
        ]

    def on_end(self, call: Callable[[], object]) -> None:
        """Have something called when it has ended."""
        self._ended.add_done_callback(lambda _: call())

    async def wait(self) -> int:
        """Wait for its end; the exit status, negative for a signal."""
        return await asyncio.shield(self._ended)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and been reaped."""
        return self._ended.done()

    async def stop(self, grace: float) -> int:
        """End it: wait ``grace`` seconds for it to leave by itself, SIGTERM, SIGKILL; its status.

        Its wire is closed by the caller first, which tells an idle worker to leave. Cancelled, it
        is killed all the same.
        """
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if grace > 0:
                    await asyncio.wait({self._ended}, timeout=grace)
                if self.has_ended:
                    break
                self._signal(number)
            await asyncio.wait({self._ended})  # no deadline: nothing outlives SIGKILL for long
        finally:
            self._signal(signal.SIGKILL)  # also the children a handler left behind
        for output in self._outputs:
            output.close()
        return self._ended.result()

    def kill(self) -> None:
        """End it and all its children at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            return
        if not self.has_ended:  # it had no time yet to found its group
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sentinel)
        self._process.join()  # does not wait: the sentinel has said that it ended
        status = self._process.exitcode
        self._process.close()
        self._ended.set_result(-1 if status is None else status)


class _Output:
    """Sends each line of an output pipe to the model log.

    A reader on the descriptor rather than a transport: nothing has to be awaited to begin, so
    nothing can be cancelled half-way.
    """

    def __init__(self, pipe: BinaryIO, level: int, name: str) -> None:
        self._pipe = pipe
        self._level = level
        self._extra = {"worker": name}
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe.fileno(), self._on_readable)

    def close(self) -> None:
        """Log what is left and close the pipe. Safe to call twice."""
        if self._pipe.closed:
            return
        while self._read():
            pass
        if self._rest:
            self._log(self._rest)
            self._rest = b""
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    def _on_readable(self) -> None:
        if not self._read():
            self.close()

    def _read(self) -> bool:
        """Log one piece; whether there was any."""
        try:
            data = os.read(self._pipe.fileno(), _LONGEST_LINE_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log(line)
        if len(self._rest) > _LONGEST_LINE_BYTES:
            self._log(self._rest)
            self._rest = b""
        return bool(data)

    def _log(self, line: bytes) -> None:
        text = line.decode(errors="backslashreplace").rstrip("\r")
        model_log.log(self._level, "%s", text, extra=self._extra)
