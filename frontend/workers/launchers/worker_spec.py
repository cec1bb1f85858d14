"""The parameters of a worker process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from marserve.backend.processes.bootstrap import Runner
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
        terminal: Whether its handler is debugged, and shares the terminal of the server.
        torch: The reason for ``threads``, and how they wait, in agreement with ``environment``.
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
