"""What the supervisor of a worker needs of whoever starts its process."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from marserve.backend.processes.bootstrap import Runner
from marserve.frontend.workers.failures import Diagnostics


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process is started with.

    Attributes:
        name: Appears in the model log, e.g. ``W-9000-resnet-152_1.0``.
        environment: Its whole environment.
        python_path, model_dir, threads: See `backend.worker.WorkerPlace`.
        python: Interpreter that is started for it; empty for a child of this one.
        runner: What starts its processes in our stead; needs ``python``.
        on_metric_line: Called with what it prints in lines that begin with ``[METRICS]``.
        terminal: Whether its handler is debugged: it stays with the terminal of the server.
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


class WorkerProcess(Protocol):
    """A running worker, wherever it runs; its output goes to the model log.

    Attributes:
        pid: Its process id.
        sock: Our end of the stream to it (`backend.protocol`); whoever takes it closes it.
        diagnostics: What it left behind, once it was stopped.
    """

    pid: int
    sock: socket.socket
    diagnostics: Diagnostics

    def on_exit(self, call: Callable[[], object]) -> None:
        """Have something called when it has ended."""

    async def exit_within(self, seconds: float) -> str:
        """Wait for it to end by itself; how, a sentence, empty if it did not, or was told to."""

    async def write_stacks(self) -> None:
        """Have it write down where its Python code stands now, for `diagnostics`."""

    async def stop(self, grace: float) -> int:
        """End it, and all its children; its exit status, negative for a signal.

        Its socket is closed by the caller first, which tells an idle worker to leave, and it may do
        so by itself for ``grace`` seconds. Cancelled, it is killed all the same.
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

    def close(self) -> None:
        """Give back what it holds, once all workers have ended."""
