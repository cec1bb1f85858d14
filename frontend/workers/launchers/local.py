"""Starts workers on this machine: as children of multiprocessing, or by command lines.

Starting blocks until the fork server has done its imports, or an interpreter has started; so it is
done in threads.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from marserve.frontend.workers.launchers.command import check_interpreter, start_command
from marserve.frontend.workers.launchers.fork_server import ForkServer
from marserve.frontend.workers.launchers.launcher import WorkerSpec
from marserve.frontend.workers.launchers.local_process import LocalProcess, Started
from marserve.frontend.workers.launchers.post_mortem import OomKills
from marserve.frontend.workers.terminal import Terminal

_COMMANDS_AT_ONCE = 4


class LocalLauncher:
    """Starts worker processes on this machine; a `launcher.Launcher`.

    Children are started one after the other by one thread; other interpreters by other threads,
    because checking one may take long. A start that is cancelled while it waits for a thread never
    begins; a process whose start was cancelled ends when its socket is closed. For ``method`` and
    ``preload`` see `ForkServer`.
    """

    def __init__(self, method: str = "forkserver", preload: Sequence[str] = ()) -> None:
        self._fork_server = ForkServer(method, preload)
        self._checked: set[str] = set()
        self._oom_kills = OomKills()
        self._children = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launcher")
        self._commands = ThreadPoolExecutor(
            _COMMANDS_AT_ONCE, thread_name_prefix="launcher-command"
        )

    def warm_up(self) -> None:
        """Start the fork server, so that its imports run while the server goes on starting."""
        self._children.submit(self._fork_server.ensure_running)

    async def start(self, spec: WorkerSpec) -> LocalProcess:
        """See `Launcher.start`."""
        terminal = Terminal() if spec.terminal else None
        if spec.python:
            starting = self._commands.submit(self._start_command, spec)
        else:
            starting = self._children.submit(self._fork_server.start, spec)
        try:  # no deadline: that of the supervisor cancels this
            started = await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            if not starting.cancel():
                starting.add_done_callback(_discard)
            raise
        try:
            return LocalProcess(spec, started, self._oom_kills, terminal)
        except OSError:
            started.discard()
            raise

    def close(self) -> None:
        """End the fork server and the threads. The workers must have ended."""
        self._children.submit(self._fork_server.close)
        self._commands.shutdown(wait=True)
        self._children.shutdown(wait=True)

    def _start_command(self, spec: WorkerSpec) -> Started:
        if spec.python not in self._checked:
            check_interpreter(spec)
            self._checked.add(spec.python)
        return start_command(spec)


def _discard(starting: "Future[Started]") -> None:
    """Stop a process whose start was cancelled."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().discard()
