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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import BinaryIO

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

    All calls into multiprocessing share one thread: it keeps the exit status of a child in a place
    that must not be read by two at once.

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
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(self._thread, _start, self._context, spec)
        try:
            started = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_abandon)
            raise
        worker = WorkerProcess(spec.name, started, self._thread)
        await worker.follow_output(started)
        return worker

    def close(self) -> None:
        """End the fork server and the thread. The workers must have ended."""
        if isinstance(self._context, ForkServerContext):
            # It would end by itself soon after us, but nobody should find it when we are gone; the
            # library has no public way.
            self._thread.submit(forkserver._forkserver._stop)  # type: ignore[attr-defined]  # noqa: SLF001
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


def _abandon(starting: asyncio.Future[_Started]) -> None:
    """Nobody wants the process any more; without its wire it ends by itself."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


class WorkerProcess:
    """A running worker.

    Attributes:
        pid: Its process id, which is also the id of its process group.
        wire: Our end of the socket pair; whoever takes it closes it.
    """

    def __init__(self, name: str, started: _Started, thread: ThreadPoolExecutor) -> None:
        assert started.process.pid is not None
        self.name = name
        self.pid: int = started.process.pid
        self.wire = started.wire
        self._process = started.process
        self._sentinel = started.process.sentinel
        self._thread = thread
        self._outputs: list[asyncio.BaseTransport] = []
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._sentinel, self._on_end)

    async def follow_output(self, started: _Started) -> None:
        """Send each line of its output to the model log."""
        await self._follow(started.stdout, logging.INFO, "stdout")
        await self._follow(started.stderr, logging.WARNING, "stderr")

    async def _follow(self, pipe: BinaryIO, level: int, stream: str) -> None:
        extra = {"worker": f"{self.name}-{stream}"}
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: _Lines(lambda line: model_log.log(level, "%s", line, extra=extra)), pipe
        )
        self._outputs.append(transport)

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

        Its wire is closed by the caller first, which tells an idle worker to leave.
        """
        for patience, number in ((grace, signal.SIGTERM), (grace, signal.SIGKILL)):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.wait(), patience)
                break
            self._signal(number)
        status = await self.wait()  # no deadline: nothing outlives SIGKILL for long
        self._signal(signal.SIGKILL)  # children a handler left behind
        for output in self._outputs:
            output.close()
        return status

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
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sentinel)
        reaping = loop.run_in_executor(self._thread, _reap, self._process)
        reaping.add_done_callback(lambda done: self._ended.set_result(done.result()))


def _reap(process: BaseProcess) -> int:
    process.join()  # does not wait: the sentinel has said that it ended
    status = process.exitcode
    process.close()
    return -1 if status is None else status


class _Lines(asyncio.Protocol):
    """Cuts a byte stream into lines of text."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log(line.decode(errors="backslashreplace").rstrip("\r"))
        if len(self._rest) > _LONGEST_LINE_BYTES:
            self._flush()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._rest:
            self._flush()

    def _flush(self) -> None:
        self._log(self._rest.decode(errors="backslashreplace"))
        self._rest = b""
