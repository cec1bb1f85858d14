"""Models whose workers use several devices or several processes.

torchrun starts ``pp``, ``tp`` and ``pptp``: one process ("rank") for each part of the model;
``custom`` is one process that sees all its devices. Extensions of TorchServe: a parallelType
without a ``torchrun`` map starts parallelLevel ranks; torchrun is that of the worker's interpreter;
without a rendezvous endpoint on a single machine, every worker has a separate one in a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marserve.backend.processes.bootstrap import Runner
from marserve.frontend.configuration.model_schema import TorchRun
from marserve.frontend.workers.devices import visible_names

_MODULE = "torch.distributed.run"
_STORE = "store_type=file"


@dataclass(frozen=True)
class Parallel:
    """The devices and processes of a worker."""

    type: str  # as in model-config.yaml
    level: int  # devices of each worker, if the machine has any
    torchrun: TorchRun  # the options of torchrun; not used by ``custom``

    @property
    def has_own_rendezvous(self) -> bool:
        """Whether the processes are all on this machine, without a given rendezvous."""
        run = self.torchrun
        return run.nnodes == 1 and run.rdzv_backend == "c10d" and not run.rdzv_endpoint

    @property
    def has_ranks(self) -> bool:
        """Whether a worker is several processes."""
        return self.type != "custom"

    def runner(self, name: str, log_dir: Path) -> Runner | None:
        """Return what starts the processes of a worker of this name; None for a single process."""
        if not self.has_ranks:
            return None
        return Runner(
            _MODULE,
            tuple(self._arguments(name, log_dir)),
            self.torchrun.processes,
            to_all=self.type != "pp",
            meets_itself=self.has_own_rendezvous,
        )

    def environment(self, gpus: Sequence[int]) -> Mapping[str, str]:
        """Return additional environment variables of its processes, on these GPUs."""
        added = {"CUDA_VISIBLE_DEVICES": visible_names(gpus)} if gpus else {}
        if self.has_ranks:
            added |= {"LOGLEVEL": "INFO", "OMP_NUM_THREADS": str(self.torchrun.omp_threads)}
        return added

    def _arguments(self, name: str, log_dir: Path) -> Sequence[str]:
        run = self.torchrun
        stores = [_STORE] if self.has_own_rendezvous else []
        options = {
            "nnodes": run.nnodes,
            "nproc-per-node": run.processes,
            "rdzv-backend": run.rdzv_backend,
            "rdzv-endpoint": run.rdzv_endpoint or None,
            "rdzv-conf": ",".join(filter(None, [run.rdzv_conf, *stores])) or None,
            "monitor-interval": run.monitor_interval,
            "node-rank": run.node_rank,
            "log-dir": log_dir.absolute() / "torchelastic_ts",
            "rdzv-id": name,
            # TorchServe's 1 would start ranks without a connection; the whole worker is replaced.
            "max-restarts": 0,
        }
        return [f"--{key}={value}" for key, value in options.items() if value is not None]
