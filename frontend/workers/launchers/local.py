"""Starts workers on this machine: by the fork server, or by command lines."""

import asyncio
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from marserve.backend.processes.fork_server import NO_WORKER, WORKER
from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.lifecycle.started_processes import StartedProcesses
from marserve.frontend.workers.launchers.command import check_interpreter, start_command
from marserve.frontend.workers.launchers.fork_server import ForkServer
from marserve.frontend.workers.launchers.local_process import LocalProcess, Started, WorkerSpec
from marserve.frontend.workers.launchers.openmp import VARIABLES, variables_of
from marserve.frontend.workers.launchers.post_mortem import OomKills
from marserve.frontend.workers.terminal import Terminal

_COMMANDS_AT_ONCE = 4


class LocalLauncher:
    """Starts worker processes.

    ``method`` is ``forkserver``, or ``spawn`` to start each worker in a new interpreter, because
    some libraries do not support fork. There is a fork server for each wait policy of `openmp`,
    usually one; `warm_up` starts that of ``environment``.
    """

    def __init__(
        self,
        method: str = "forkserver",
        preload: Sequence[str] = (),
        preload_seconds: float = 120.0,
        on_fork_server_replaced: Callable[[], object] = lambda: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._forks = method == "forkserver"
        self._make_fork_server = partial(
            ForkServer, preload, preload_seconds, on_fork_server_replaced
        )
        self._environment = os.environ if environment is None else environment
        #: By the variables of OpenMP in their environment.
        self._fork_servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}
        self._checked = {sys.executable}
        self._oom_kills = OomKills()
        self._processes = StartedProcesses()
        self._sweeps: set[asyncio.Task[Any]] = set()
        self._commands = asyncio.Semaphore(_COMMANDS_AT_ONCE)

    def warm_up(self) -> None:
        """Start the fork server, so that its imports run while the server continues to start."""
        if self._forks:
            self._fork_server(self._environment).warm_up()

    async def start(self, spec: WorkerSpec) -> LocalProcess:
        """Start a worker that waits for a `Load`; a cancelled start leaves no process.

        Raises:
            OSError: It could not be started.
        """
        terminal = Terminal() if spec.terminal else None
        spec = replace(spec, environment={**spec.environment, WORKER: uuid.uuid4().hex})
        if not self._forks or spec.python:
            async with self._commands:
                started = await in_abandonable_thread(
                    self._start_command, spec, discard=Started.discard
                )
        else:
            started = await self._fork_server(spec.environment).start(spec)
        try:
            return LocalProcess(
                spec, started, self._oom_kills, self._processes, self._sweeps, terminal
            )
        except OSError:
            started.discard()
            raise

    async def close(self) -> None:
        """End the fork servers, after all workers; a thread that hangs is abandoned."""
        await asyncio.gather(*self._sweeps)  # each has a deadline
        async with asyncio.TaskGroup() as group:
            for each in self._fork_servers.values():
                group.create_task(each.close())

    def _fork_server(self, environment: Mapping[str, str]) -> ForkServer:
        openmp = variables_of(environment)
        key = tuple(openmp.items())
        if key not in self._fork_servers:
            others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
            own = {**others, **openmp, WORKER: NO_WORKER}
            self._fork_servers[key] = self._make_fork_server(environment=own)
        return self._fork_servers[key]

    def _start_command(self, spec: WorkerSpec) -> Started:
        python = spec.python or sys.executable
        if python not in self._checked:
            check_interpreter(spec)
            self._checked.add(python)
        return start_command(spec)
