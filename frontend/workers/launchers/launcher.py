"""The interface of launchers, which start worker processes for the supervisor."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from marserve.backend.processes.bootstrap import Runner
from marserve.frontend.workers.failures import Diagnostics
from marserve.frontend.workers.launchers.openmp import TorchOptions


@dataclass(frozen=True)
class WorkerSpec:
    """The parameters of a worker process.

    Attributes:
        name: Its name in the model log, e.g. ``W-9000-resnet-152_1.0``.
        environment: Its complete environment.
        python_path: First entries of ``sys.path``.
        model_dir: Its working directory.
        threads: Number of torch's threads; 0 leaves it to the environment.
        python: Interpreter to start; empty for a fork of a process with this interpreter.
        runner: A program that starts its processes, such as torchrun; needs ``python``.
        on_metric_line: Called with lines of its output that begin with ``[METRICS]``.
        torch: The reason for ``threads``, and how they wait, in agreement with ``environment``.
        terminal: Whether its handler is debugged, and shares the terminal of the server.
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
    """A running worker; its output goes to the model log.

    Attributes:
        pid: Its process id.
        sock: The frontend's end of the socket pair (`backend.protocol`), which `stop` closes.
        diagnostics: Its last output and its stacks, after it was stopped.
        ran_out_of_memory: Whether the kernel killed it for lack of memory.
    """

    pid: int
    sock: socket.socket
    diagnostics: Diagnostics
    ran_out_of_memory: bool

    def on_exit(self, call: Callable[[], object]) -> None:
        """Call this when the process has ended."""

    async def exit_within(self, seconds: float) -> str:
        """Wait for it to end by itself.

        Returns:
            A sentence that says how it ended; empty if it has not, or was stopped.
        """

    async def write_stacks(self) -> None:
        """Make it write the stacks of its threads, for `diagnostics`."""

    async def stop(self, grace: float, close: Callable[[], object] = lambda: None) -> int | None:
        """Stop it and all its children. If the call is cancelled, they are killed.

        Args:
            grace: Seconds for an idle worker to end after its socket was closed, and again after
                SIGTERM; then follows SIGKILL.
            close: Closes the socket; may be called twice.

        Returns:
            The exit status, negative for a signal; None if it is unknown, because the process has
            lost its parent or does not end by SIGKILL.
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
