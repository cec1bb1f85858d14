"""The resources that the workers of all models share."""

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marserve.frontend.configuration.config import Config
from marserve.frontend.lifecycle import workdir
from marserve.frontend.tracing.time_lines import TimeLines
from marserve.frontend.workers.calls import CallModel, no_calls
from marserve.frontend.workers.cores import usable_cores
from marserve.frontend.workers.devices import DeviceAllocator
from marserve.frontend.workers.launchers.local import LocalLauncher


@dataclass(eq=False)
class WorkerHost:
    """The resources that the workers of all models share, and the time lines of their requests."""

    config: Config
    launcher: LocalLauncher
    devices: DeviceAllocator
    cpu_launcher: bool = False  # whether torch's launcher for CPUs is configured, and usable
    #: Returns the function that calls models on behalf of the handler of a name and version.
    calls_by: Callable[[str, str], CallModel] = lambda _name, _version: no_calls
    time_lines: TimeLines = field(default_factory=TimeLines)

    def __post_init__(self) -> None:
        self.cores = usable_cores()
        python = self.config.python
        #: The interpreter of the workers; empty for the server's.
        self.python = "" if python is None or _is_ours(python) else str(python)
        self._ids = itertools.count(self.config.initial_worker_port)
        self._next_distributed_id = self.config.initial_distribution_port

    def next_worker_id(self, parallel_level: int = 0) -> int:
        """Return a new number, TorchServe's "port"; a parallel worker uses several."""
        if not parallel_level:
            return next(self._ids)
        worker_id = self._next_distributed_id
        self._next_distributed_id += parallel_level
        return worker_id

    def environment(
        self, python_path: Sequence[str] = (), added: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Return the environment of a worker: the server's with additions, without withheld ones.

        ``python_path`` is appended to PYTHONPATH, for programs that a handler starts.
        """
        withheld = self.config.blacklist_env_vars
        environment = {
            "TS_REQUEST_SEQUENCE_ID": self.config.ts_header_key_sequence_id,
            "TS_REQUEST_SEQUENCE_START": self.config.ts_header_key_sequence_start,
            "TS_REQUEST_SEQUENCE_END": self.config.ts_header_key_sequence_end,
            **os.environ,
            **(added or {}),
            "TS_DECODE_INPUT_REQUEST": str(self.config.decode_input_request).lower(),
            "TS_IPEX_ENABLE": str(self.config.ipex_enable).lower(),
            "TS_IPEX_GPU_ENABLE": str(self.config.ipex_gpu_enable).lower(),
        }
        inherited = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        environment["PYTHONPATH"] = os.pathsep.join([*inherited, *python_path])
        return {
            name: value
            for name, value in environment.items()
            if withheld is None or name == workdir.VARIABLE or not withheld.fullmatch(name)
        }


def _is_ours(python: Path) -> bool:
    """Return whether it is this interpreter in this environment."""
    ours = Path(sys.executable)
    return python.parent == ours.parent and python.samefile(ours)
