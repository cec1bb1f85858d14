"""A worker process on this machine: watches its end, stops its group, keeps its last output."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Protocol

import psutil

from marserve.frontend.process_group import ProcessGroup
from marserve.frontend.workers.failures import Diagnostics
from marserve.frontend.workers.launchers.launcher import WorkerSpec
from marserve.frontend.workers.launchers.output import OutputLog
from marserve.frontend.workers.launchers.post_mortem import (
    OomKills,
    StackFile,
    catches,
    exit_phrase,
)
from marserve.frontend.workers.terminal import Terminal

# How much of a worker's output is remembered.
_LAST_LINES = 20
# How long a worker may take to write down its stacks, and how often that is looked at.
_STACKS_SECONDS = 0.5
_POLL_SECONDS = 0.02
# How long SIGKILL may take: longer only where the kernel waits for a disk or a device.
_KILL_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Child(Protocol):
    """A process that was started; it leads a group of its own, but for one that is debugged.

    ``sentinel`` is a descriptor that is readable when it has ended.
    """

    pid: int
    sentinel: int

    async def reap(self) -> int | None:
        """Once it has ended: free what stands for it; the exit status, if it is known."""

    def discard(self) -> None:
        """Make sure that it ends; its start was cancelled, and its socket is closed."""


@dataclass(frozen=True)
class Started:
    """A process with our ends of its socket pair and its output, and the file of its stacks."""

    child: Child
    sock: socket.socket
    stdout: IO[bytes]
    stderr: IO[bytes]
    stacks: StackFile

    def discard(self) -> None:
        """End it."""
        self.stacks.close()
        self.sock.close()
        self.stdout.close()
        self.stderr.close()
        self.child.discard()


@contextlib.contextmanager
def our_ends() -> Iterator[tuple[ExitStack, socket.socket, socket.socket, StackFile]]:
    """Make what every way to start a process needs, for a ``with`` block that starts it.

    Yields:
        A stack for what else is ours, closed with the rest if the block raises; our end of a socket
        pair, and the worker's, which is closed in any case; the file of its stacks.
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
    """A running worker of this machine; a `launcher.WorkerProcess`."""

    def __init__(
        self,
        spec: WorkerSpec,
        started: Started,
        oom_kills: OomKills,
        terminal: Terminal | None = None,
    ) -> None:
        self.pid = started.child.pid
        self.sock = started.sock
        self.diagnostics = Diagnostics()
        self.ran_out_of_memory = False
        self._child = started.child
        self._stacks = started.stacks
        self._oom_kills = oom_kills
        self._runner = spec.runner
        self._terminal = terminal
        self._groups = {self.pid: ProcessGroup(self.pid)}
        #: Those of its children that are in our own group.
        self._children: list[psutil.Process] = []
        self._was_signalled = False
        self._exit_cause = ""
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int | None] = loop.create_future()
        self._reaping: asyncio.Task[None] | None = None
        loop.add_reader(self._child.sentinel, self._on_exit)
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
        """Whether it has ended and been reaped."""
        return self._exited.done()

    def on_exit(self, call: Callable[[], object]) -> None:
        """See `WorkerProcess.on_exit`."""
        self._exited.add_done_callback(lambda _: call())

    async def exit_within(self, seconds: float) -> str:
        """See `WorkerProcess.exit_within`."""
        self._find_descendants()  # while they can be found
        await asyncio.wait({self._exited}, timeout=seconds)
        return self._exit_cause

    async def stop(self, grace: float) -> int | None:
        """See `WorkerProcess.stop`: after ``grace`` seconds comes SIGTERM, then SIGKILL."""
        self._find_descendants()
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if grace > 0:
                    await asyncio.wait({self._exited}, timeout=grace)
                if self.has_exited:
                    break
                self._signal(number)
            await asyncio.wait({self._exited}, timeout=_KILL_SECONDS)
        finally:
            self._kill()  # also the children a handler left behind
            self._close()
        if not self.has_exited:
            logger.error("Process %d does not end by SIGKILL; it is left to itself.", self.pid)
            return None
        return self._exited.result()

    async def write_stacks(self) -> None:
        """See `WorkerProcess.write_stacks`."""
        before = size = self._stacks.size
        for pid in self._pids():
            if catches(pid, signal.SIGQUIT):
                with contextlib.suppress(OSError):  # gone, or another user's by now
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
        for group in self._groups.values():
            group.close()
        self.diagnostics = Diagnostics(self._stacks.lines(), tuple(self._last_lines))

    def _kill(self) -> None:
        """End it and all its children at once."""
        self._find_descendants()
        self._signal(signal.SIGKILL)
        for child in self._children:
            with contextlib.suppress(psutil.Error):
                child.kill()

    def _find_descendants(self) -> None:
        """Remember what a signal to its own group does not reach, while it lives.

        A runner puts each of its processes into a group of its own; they are found below it,
        orphans too (`backend.processes.runner`). The children of one that is debugged are in our
        own group.
        """
        if self.has_exited or (self._runner is None and self._terminal is None):
            return
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.pid).children(recursive=True)
            if self._terminal is not None:
                self._children = children
                return
            for child in children:
                with contextlib.suppress(OSError):  # gone, or no descriptor left
                    number = os.getpgid(child.pid)
                    if number not in self._groups:
                        self._groups[number] = ProcessGroup(number)

    def _pids(self) -> list[int]:
        """Of those of its processes that run the handler."""
        if self._runner is None:
            return [self.pid]
        with contextlib.suppress(psutil.Error):
            return [each.pid for each in psutil.Process(self.pid).children(recursive=True)]
        return []

    def _signal(self, number: signal.Signals) -> None:
        """Signal its group; a runner passes SIGTERM on, but SIGKILL has to reach all groups."""
        self._was_signalled = True
        groups = self._groups.values() if number is signal.SIGKILL else [self._groups[self.pid]]
        for group in groups:
            group.send(number)

    def _on_exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._child.sentinel)
        self._groups[self.pid].send(signal.SIGKILL)  # its children: its number is its own till now
        self._reaping = loop.create_task(self._reap())

    async def _reap(self) -> None:
        status = await self._child.reap()
        self._groups[self.pid].leader_was_reaped()
        if self._terminal is not None:
            self._terminal.restore()
        if not self._was_signalled:
            self._exit_cause = self._cause_of(status)
        self._exited.set_result(status)

    def _cause_of(self, status: int | None) -> str:
        # A runner ends as the first of its processes did that did not end well.
        if status == -signal.SIGKILL and self._oom_kills.was_another():
            self.ran_out_of_memory = True
            return "Its process was killed: out of memory."
        return f"Its process {exit_phrase(status)}."
