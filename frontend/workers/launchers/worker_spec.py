"""The parameters of a worker process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from marserve.backend.processes.bootstrap import Runner
from marserve.frontend.workers.launchers.openmp import TorchOptions


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
