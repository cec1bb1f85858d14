"""Models whose workers take several devices, or several processes.

``pp``, ``tp`` and ``pptp`` are started by torchrun: one process ("rank") for each part of the
model; ``custom`` is one process that sees all its devices. Beyond TorchServe: a parallelType
without a ``torchrun`` map starts parallelLevel ranks (it crashed); torchrun is that of the worker's
interpreter; and where no rendezvous endpoint is named on a single machine, every worker has one of
its own, in memory.
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
    """How a worker is more than one device, or one process."""

    type: str  # as in model-config.yaml
    level: int  # devices of each worker, where there are any
    torchrun: TorchRun  # how its processes are started; not used by ``custom``

    @property
    def has_own_rendezvous(self) -> bool:
        """Whether its processes meet no others, of other machines."""
        run = self.torchrun
        return run.nnodes == 1 and run.rdzv_backend == "c10d" and not run.rdzv_endpoint

    @property
    def has_ranks(self) -> bool:
        """Whether a worker is several processes."""
        return self.type != "custom"

    def runner(self, name: str, log_dir: Path) -> Runner | None:
        """What starts a worker's processes; None where it is a single one.

        Args:
            name: Unique to the worker.
            log_dir: Of the server.
        """
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
        """What the environment of its processes, on these GPUs, has in addition."""
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
            # TorchServe's 1 would start ranks that find no wire: the whole worker is replaced.
            "max-restarts": 0,
        }
        return [f"--{key}={value}" for key, value in options.items() if value is not None]
