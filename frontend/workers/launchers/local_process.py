"""A worker process on this machine: detects its end, keeps its last output, kills its children.

Children in its process group are killed with it at once. Children in other sessions are found by
the mark in their environment, or as descendants (`frontend.lifecycle.started_processes`).
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import psutil

from marserve.backend.processes.bootstrap import Runner
from marserve.backend.processes.fork_server import WORKER
from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.lifecycle.started_processes import StartedProcesses
from marserve.frontend.measurements import UNREADABLE
from marserve.frontend.process_group import ProcessGroup
from marserve.frontend.workers.failures import (
    ConnectionLost,
    Diagnostics,
    Disconnected,
    Poisoned,
    ResponseTimedOut,
)
from marserve.frontend.workers.launchers.openmp import TorchOptions
from marserve.frontend.workers.launchers.output import OutputLog
from marserve.frontend.workers.launchers.post_mortem import (
    OomKills,
    StackFile,
    catches,
    exit_phrase,
)
from marserve.frontend.workers.terminal import Terminal

T = TypeVar("T")

# Remembered lines of a worker's output.
_LAST_LINES = 20
# Time limit for a worker to write its stacks, and the interval at which they are polled.
_STACKS_SECONDS = 0.5
_POLL_SECONDS = 0.02
# Time limit of SIGKILL: it takes longer only if the kernel waits for a disk or a device.
_KILL_SECONDS = 5.0
# Time for a process to end after its connection: torchrun ends its other processes first.
_EXIT_SECONDS = 5.0
# Time limit of the search for its children, and of killing them.
_SEARCH_SECONDS = 6.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """The parameters of a worker process."""

    name: str  # in the model log, e.g. W-9000-resnet-152_1.0
    environment: Mapping[str, str]  # complete
    python_path: tuple[str, ...]  # first entries of sys.path
    model_dir: str  # its working directory
    threads: int  # of torch; 0 leaves it to the environment
    python: str = ""  # the interpreter; empty for a fork of a process with this interpreter
    runner: Runner | None = None  # a program that starts its processes; needs ``python``
    on_metric_line: Callable[[str], None] | None = None  # receives lines with [METRICS]
    terminal: bool = False  # its handler is debugged, and shares the terminal of the server
    #: The reason for ``threads``, and how they wait, in agreement with ``environment``.
    torch: TorchOptions = field(default_factory=TorchOptions)


@dataclass(frozen=True)
class Started:
    """A process that was started; it leads a process group, unless its handler is debugged.

    ``sentinel`` is a descriptor that is readable when the process has ended; ``sock`` is our end of
    its socket pair.
    """

    pid: int
    sentinel: int
    sock: socket.socket
    stdout: IO[bytes]
    stderr: IO[bytes]
    stacks: StackFile
    reap: Callable[[], Awaitable[int | None]]  # after its end; returns its status if it is known
    kill: Callable[[], object]  # kills it and closes ``sentinel``: its start was cancelled

    def discard(self) -> None:
        """Kill it and close the rest."""
        self.stacks.close()
        self.sock.close()
        self.stdout.close()
        self.stderr.close()
        self.kill()


@contextlib.contextmanager
def our_ends() -> Iterator[tuple[ExitStack, socket.socket, socket.socket, StackFile]]:
    """Make the resources that both ways to start a process need.

    They are a stack for further ones, which are closed with the rest if the block raises; our end
    of a socket pair; the worker's end, which is closed in any case; the file of its stacks.
    """
    with ExitStack() as ours:
        sock, their_sock = socket.socketpair()
        ours.callback(sock.close)
        with their_sock:
            stacks = StackFile()
            ours.callback(stacks.close)
            yield ours, sock, their_sock, stacks
        ours.pop_all()


class LocalProcess:
    """A running worker; its output goes to the model log.

    Attributes:
        sock: The frontend's end of the socket pair, which `stop` closes.
        diagnostics: Its last output and its stacks, after it was stopped.
        ran_out_of_memory: Whether the kernel killed it for lack of memory.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        started: Started,
        oom_kills: OomKills,
        processes: StartedProcesses,
        sweeps: set[asyncio.Task[Any]],
        terminal: Terminal | None = None,
    ) -> None:
        self.pid = started.pid
        self.sock = started.sock
        self.diagnostics = Diagnostics()
        self.ran_out_of_memory = False
        self._started = started
        self._stacks = started.stacks
        self._oom_kills = oom_kills
        self._runner = spec.runner
        self._terminal = terminal
        #: The worker, with its start time, so that it is not confused with a later process.
        self._roots: set[psutil.Process] = set()
        with contextlib.suppress(*UNREADABLE):  # it has ended
            self._roots = {psutil.Process(self.pid)}
        self._group = ProcessGroup(self.pid)
        self._processes = processes
        #: Searches after the ends of workers, which may last until after the next start.
        self._sweeps = sweeps
        self._mark = f"{WORKER}={spec.environment[WORKER]}"
        self._was_signalled = False
        self._exit_cause = ""
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int | None] = loop.create_future()
        self._reaping: asyncio.Task[None] | None = None
        loop.add_reader(started.sentinel, self._on_exit)
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._outputs = [
            OutputLog(pipe, level, f"{spec.name}-{word}", spec.on_metric_line, self._last_lines)
            for pipe, level, word in (
                (started.stdout, logging.INFO, "stdout"),
                (started.stderr, logging.WARNING, "stderr"),
            )
        ]

    @property
    def has_exited(self) -> bool:
        """Whether it has ended and was reaped."""
        return self._exited.done()

    def on_exit(self, call: Callable[[], object]) -> None:
        """Call this when the process has ended."""
        self._exited.add_done_callback(lambda _: call())

    async def exit_within(self, seconds: float) -> str:
        """Wait for it to end by itself; return a sentence on how it did, empty if it did not."""
        await asyncio.wait({self._exited}, timeout=seconds)
        return self._exit_cause

    async def stop(self, grace: float, close: Callable[[], object] = lambda: None) -> int | None:
        """Stop it and all its children; if the call is cancelled, they are killed.

        Args:
            grace: Seconds for an idle worker to end after its socket was closed, and again after
                SIGTERM; then follows SIGKILL.
            close: Closes the socket; may be called twice.

        Returns:
            The exit status, negative for a signal; None if it is unknown, because the process has
            lost its parent or does not end by SIGKILL.
        """
        has_died = self.has_exited
        known: Iterable[psutil.Process] = ()  # includes children without the mark
        try:
            if not has_died:
                known = await _in_time(self._processes.find, self._mark, self._roots) or ()
            close()
            for number in (signal.SIGTERM, signal.SIGKILL):
                if grace > 0:
                    await asyncio.wait({self._exited}, timeout=grace)
                if self.has_exited:
                    break
                self._signal(number)
            await asyncio.wait({self._exited}, timeout=_KILL_SECONDS)
        finally:
            close()
            self._signal(signal.SIGKILL)
            self._close()
            sweep = asyncio.create_task(_in_time(self._processes.kill, self._mark, known))
            self._sweeps.add(sweep)
            sweep.add_done_callback(self._sweeps.discard)
            if not has_died:  # else its replacement does not wait for the search
                await asyncio.wait({sweep})
        if not self.has_exited:
            logger.error("Process %d does not end by SIGKILL; it is abandoned.", self.pid)
            return None
        return self._exited.result()

    async def write_stacks(self) -> None:
        """Make it write the stacks of its threads, and wait until they are complete."""
        before = size = self._stacks.size
        for pid in self._pids():
            if catches(pid, signal.SIGQUIT):
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(pid, signal.SIGQUIT)
        deadline = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline and not self.has_exited:
            await asyncio.sleep(_POLL_SECONDS)
            earlier, size = size, self._stacks.size
            if before < size == earlier:
                break

    def _close(self) -> None:
        self._stacks.close()
        for output in self._outputs:
            output.close()
        self._group.close()
        self.diagnostics = Diagnostics(self._stacks.lines(), tuple(self._last_lines))

    def _pids(self) -> list[int]:
        """Return the ids of its processes that run the handler."""
        if self._runner is None:
            return [self.pid]
        with contextlib.suppress(*UNREADABLE):
            return [each.pid for each in psutil.Process(self.pid).children(recursive=True)]
        return []

    def _signal(self, number: signal.Signals) -> None:
        self._was_signalled = True
        if not self.has_exited:
            self._group.send(number)

    def _on_exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._started.sentinel)
        self._group.send(signal.SIGKILL)  # its children; its id is not reused before `reap`
        self._reaping = loop.create_task(self._reap())

    async def _reap(self) -> None:
        try:
            status = await self._started.reap()
        finally:
            os.close(self._started.sentinel)
        if self._terminal is not None:
            self._terminal.restore()
        if not self._was_signalled:
            self._exit_cause = self._cause_of(status)
        self._exited.set_result(status)

    def _cause_of(self, status: int | None) -> str:
        # A runner ends with the status of the first of its processes that failed.
        if status == -signal.SIGKILL and self._oom_kills.was_another():
            self.ran_out_of_memory = True
            return "Its process was killed: out of memory."
        return f"Its process {exit_phrase(status)}."


async def find_cause(
    loss: ConnectionLost, process: LocalProcess, setting: str, timeout: float | None
) -> str:
    """Return the cause of the loss of a worker, a sentence; empty if ``loss`` contains it.

    The code of ``loss`` becomes 507 if memory ran out. ``setting`` is the name of the timeout that
    applied.
    """
    if isinstance(loss, ResponseTimedOut):
        await process.write_stacks()
        return f"Timeout: no answer within {setting} ({timeout or 0:g} s)."
    if isinstance(loss, Poisoned):
        return "Its process cannot use its GPU any more."
    if isinstance(loss, Disconnected):
        end = await process.exit_within(_EXIT_SECONDS)
        if process.ran_out_of_memory:
            loss.code = 507
        return end or "It closed its connection, but did not end."
    return ""


async def _in_time(search: Callable[..., T], *arguments: object) -> T | None:
    """Call a function in a thread; logs and returns None if it hangs or lacks a descriptor."""
    try:
        async with asyncio.timeout(_SEARCH_SECONDS):
            return await in_abandonable_thread(search, *arguments)
    except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
        why = str(error) or f"no end within {_SEARCH_SECONDS:g} s"
        logger.warning("The search for processes that a worker has started failed: %s", why)
        return None
