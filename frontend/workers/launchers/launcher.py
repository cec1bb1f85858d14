"""One worker as an operating system process: start it, see it end, kill its group.

Processes come from multiprocessing's fork server, which has torch imported already, so that
starting or replacing a worker costs little more than loading its weights; ``spawn`` gives every
worker a fresh interpreter instead (some libraries dislike fork). The frontend itself never forks:
its descriptors would leak into the child. Workers that need another interpreter, or several
processes, are started by a command line instead (`launching`).

Starting blocks, until the fork server has done its imports, so it happens in a thread; the end of a
process is seen through the descriptor of its sentinel.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

import psutil

from marserve.backend import preloading
from marserve.frontend.workers.causes import OomKills, catches, exit_phrase
from marserve.frontend.workers.failures import Remains
from marserve.frontend.workers.launchers.processes import (
    Context,
    Started,
    WorkerSpec,
    check_interpreter,
    start_child,
    start_command,
)
from marserve.frontend.workers.output import OutputLog
from marserve.frontend.workers.terminal import Terminal

__all__ = ["Launcher", "WorkerProcess", "WorkerSpec"]


_OTHERS_AT_ONCE = 4
# How much of a worker's output is remembered.
_LAST_LINES = 20
# How long a worker may take to write down its stacks, and how often that is looked at.
_STACKS_SECONDS = 0.5
_LOOK_SECONDS = 0.02


class Launcher:
    """Starts worker processes: those of this interpreter by one method of multiprocessing.

    Children are started one after the other, by a thread; other interpreters by threads of their
    own, because nobody knows how long they take to show what they can. What is cancelled while it
    waits for its turn never begins; a process nobody wants any more ends when its wire is closed.

    Args:
        method: ``forkserver`` or ``spawn``.
        preload: Modules the fork server imports once for all workers, as far as it can.
    """

    def __init__(self, method: str = "forkserver", preload: Sequence[str] = ()) -> None:
        self._context: Context
        self._preload = ",".join(preload)
        self._checked: set[str] = set()
        self._oom_kills = OomKills()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launcher")
        self._others = ThreadPoolExecutor(_OTHERS_AT_ONCE, thread_name_prefix="launcher-command")
        if method == "forkserver":
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(["marserve.backend.worker", preloading.__name__])
        else:
            self._context = multiprocessing.get_context("spawn")

    def warm_up(self) -> None:
        """Start the fork server, so that its imports run while the server goes on starting."""
        if isinstance(self._context, ForkServerContext):
            self._thread.submit(self._ensure_fork_server)

    async def start(self, spec: WorkerSpec) -> "WorkerProcess":
        """Start a process; its wire and its output are connected.

        Raises:
            OSError: The process could not be started.
        """
        terminal = Terminal() if spec.terminal else None
        thread = self._others if spec.python else self._thread
        starting = thread.submit(self._start, spec)
        try:
            started = await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            if not starting.cancel():
                starting.add_done_callback(_abandon)
            raise
        return WorkerProcess(spec, started, self._oom_kills, terminal)

    def _start(self, spec: WorkerSpec) -> Started:
        if not spec.python:
            if isinstance(self._context, ForkServerContext):
                self._ensure_fork_server()
            return start_child(self._context, spec)
        if spec.python not in self._checked:
            check_interpreter(spec)
            self._checked.add(spec.python)
        return start_command(spec)

    def _ensure_fork_server(self) -> None:
        """Start it if it does not run; only ever by the one thread."""
        os.environ[preloading.VARIABLE] = self._preload
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop(preloading.VARIABLE, None)

    def close(self) -> None:
        """End the fork server and the thread. The workers must have ended."""
        if isinstance(self._context, ForkServerContext):
            self._thread.submit(_end_fork_server)
        self._others.shutdown(wait=True)
        self._thread.shutdown(wait=True)


def _abandon(starting: "Future[Started]") -> None:
    """Nobody wants the process any more."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().abandon()


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
        remains: What it left behind, once it was stopped.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        started: Started,
        oom_kills: OomKills,
        terminal: Terminal | None = None,
    ) -> None:
        self.pid = started.child.pid
        self.wire = started.wire
        self.remains = Remains()
        self._child = started.child
        self._stacks = started.stacks
        self._oom_kills = oom_kills
        self._runner = spec.runner
        self._groups = {self.pid}
        self._was_told_to_end = False
        self._end = ""
        self._terminal = terminal
        self._children: list[psutil.Process] = []
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._child.sentinel, self._on_end)
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._outputs = [
            OutputLog(pipe, level, f"{spec.name}-{word}", spec.on_metric_line, self._last_lines)
            for pipe, level, word in (
                (started.stdout, logging.INFO, "stdout"),
                (started.stderr, logging.WARNING, "stderr"),
            )
        ]

    def on_end(self, call: Callable[[], object]) -> None:
        """Have something called when it has ended."""
        self._ended.add_done_callback(lambda _: call())

    async def wait(self) -> int:
        """Wait for its end; the exit status, negative for a signal."""
        return await asyncio.shield(self._ended)

    async def end_within(self, seconds: float) -> str:
        """Wait so many seconds at most for it to end by itself.

        Returns:
            How it ended, a sentence; empty if it did not, or was told to.
        """
        self._find_groups()  # while its children can be found
        await asyncio.wait({self._ended}, timeout=seconds)
        return self._end

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and been reaped."""
        return self._ended.done()

    async def stop(self, grace: float) -> int:
        """End it: wait ``grace`` seconds for it to leave by itself, SIGTERM, SIGKILL; its status.

        Its wire is closed by the caller first, which tells an idle worker to leave. Cancelled, it
        is killed all the same.
        """
        self._find_groups()
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if grace > 0:
                    await asyncio.wait({self._ended}, timeout=grace)
                if self.has_ended:
                    break
                self._signal(number)
            await asyncio.wait({self._ended})  # no deadline: nothing outlives SIGKILL for long
        finally:
            self.kill()  # also the children a handler left behind
            self._stacks.close()
        for output in self._outputs:
            output.close()
        self.remains = Remains(self._stacks.lines(), tuple(self._last_lines))
        return self._ended.result()

    async def write_stacks(self) -> None:
        """Have it write down where its Python code stands now, for `remains`."""
        before = size = self._stacks.size
        for pid in self._pids():
            if catches(pid, signal.SIGQUIT):
                with contextlib.suppress(OSError):  # gone, or another user's by now
                    os.kill(pid, signal.SIGQUIT)
        deadline = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline and not self.has_ended:
            await asyncio.sleep(_LOOK_SECONDS)
            earlier, size = size, self._stacks.size
            if before < size == earlier:
                break

    def kill(self) -> None:
        """End it and all its children at once."""
        self._find_groups()
        self._signal(signal.SIGKILL)
        for group in self._groups - {self.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for child in self._children:
            with contextlib.suppress(psutil.Error):
                child.kill()

    def _find_groups(self) -> None:
        """Remember the groups of a runner's processes: it puts each into one of its own.

        While it lives they are found below it, orphans too (see `backend.ranks`).
        """
        if self.has_ended:
            return
        if self._terminal is not None:  # its children are in our own group
            with contextlib.suppress(psutil.Error):
                self._children = psutil.Process(self.pid).children(recursive=True)
        if self._runner is None:
            return
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(ProcessLookupError):
                    self._groups.add(os.getpgid(process.pid))

    def _pids(self) -> list[int]:
        """Of those of its processes that run the handler."""
        if self._runner is None:
            return [self.pid]
        with contextlib.suppress(psutil.Error):
            return [each.pid for each in psutil.Process(self.pid).children(recursive=True)]
        return []

    def _signal(self, number: signal.Signals) -> None:
        self._was_told_to_end = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            return
        if not self.has_ended:  # it had no time yet to found its group
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._child.sentinel)
        status = self._child.reap()
        if self._terminal is not None:
            self._terminal.restore()
        if not self._was_told_to_end:
            self._end = self._end_of(status)
        self._ended.set_result(status)

    def _end_of(self, status: int) -> str:
        # A runner ends as the first of its processes did that did not end well.
        if status == -signal.SIGKILL and self._oom_kills.was_another():
            return "Its process was killed: out of memory."
        return f"Its process {exit_phrase(status)}."
