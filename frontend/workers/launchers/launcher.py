"""The interface of launchers, which start worker processes, as the supervisor uses it."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from marserve.backend.processes.bootstrap import Runner
from marserve.frontend.workers.failures import Diagnostics
from marserve.frontend.workers.launchers.openmp import TorchOptions


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process is started with.

    Attributes:
        name: Appears in the model log, e.g. ``W-9000-resnet-152_1.0``.
        environment: Its whole environment.
        python_path, model_dir, threads: See `backend.worker.WorkerPlace`.
        python: Interpreter that is started for it; empty for a child of this one.
        runner: A program that starts its processes, such as torchrun; needs ``python``.
        on_metric_line: Called with lines of its output that begin with ``[METRICS]``.
        torch: Where ``threads`` come from, and how they wait; ``environment`` agrees with that.
        terminal: Whether its handler is debugged: then it shares the terminal of the server.
    """

    name: str
    environment: Mapping[str, str]
    python_path: tuple[str, ...]
    model_dir: str
    threads: int
    python: str = ""
    runner: Runner | None = None
    on_metric_line: Callable[[str], None] | None = None
    terminal: bool = False
    torch: TorchOptions = field(default_factory=TorchOptions)


class WorkerProcess(Protocol):
    """A running worker, wherever it runs; its output goes to the model log.

    Attributes:
        pid: Its process id.
        sock: Our end of the socket pair to it (`backend.protocol`); see `stop`.
        diagnostics: Its last output and its stacks, once it was stopped.
        ran_out_of_memory: Whether the kernel has ended it for want of memory.
    """

    pid: int
    sock: socket.socket
    diagnostics: Diagnostics
    ran_out_of_memory: bool

    def on_exit(self, call: Callable[[], object]) -> None:
        """Call this when the process has ended."""

    async def exit_within(self, seconds: float) -> str:
        """Wait for it to end by itself; returns how it did, empty if it did not or was stopped."""

    async def write_stacks(self) -> None:
        """Make it write the stacks of its threads, for `diagnostics`."""

    async def stop(self, grace: float, close: Callable[[], object] = lambda: None) -> int | None:
        """Stop it and all its children; returns its exit status, negative for a signal.

        None if that is not known, because it has lost its parent, or does not end by SIGKILL.

        ``close`` closes its socket, and may be called twice. An idle worker ends at that by itself;
        it has ``grace`` seconds. If the call is cancelled, the process is killed all the same.
        """


class Launcher(Protocol):
    """Starts workers."""

    def warm_up(self) -> None:
        """Prepare for the first start, in the background."""

    async def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a worker that waits for a `Load` on its socket.

        Raises:
            OSError: It could not be started.
        """

    async def close(self) -> None:
        """Free all resources, after all workers have ended."""
