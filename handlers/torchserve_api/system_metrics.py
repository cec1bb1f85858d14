"""The host's metrics, measured now: TorchServe's ``ts.metrics.system_metrics``.

The server measures the host by itself. These are for handlers that report the load while they run,
and for a ``system_metrics_cmd`` of one's own, whose module `collect_all` is given: it calls every
function that the module has.
"""

import importlib
import logging
import types
from collections.abc import Callable
from typing import Any

import psutil

from marserve.backend.metrics import Dimension, Metric

logger = logging.getLogger(__name__)

system_metrics: list[Metric] = []  # what was measured, the newest last
dimension = [Dimension("Level", "Host")]

_MIB, _GIB = 2**20, 2**30


def _measurement(name: str, unit: str, read: Callable[[], float]) -> Callable[[], None]:
    def measure() -> None:
        system_metrics.append(Metric(name, read(), unit, dimension))

    return measure


cpu_utilization = _measurement("CPUUtilization", "percent", psutil.cpu_percent)  # since last asked
memory_used = _measurement("MemoryUsed", "MB", lambda: psutil.virtual_memory().used / _MIB)
memory_available = _measurement(
    "MemoryAvailable", "MB", lambda: psutil.virtual_memory().available / _MIB
)
memory_utilization = _measurement(
    "MemoryUtilization", "percent", lambda: psutil.virtual_memory().percent
)
disk_used = _measurement("DiskUsage", "GB", lambda: psutil.disk_usage("/").used / _GIB)
disk_available = _measurement("DiskAvailable", "GB", lambda: psutil.disk_usage("/").free / _GIB)
disk_utilization = _measurement(
    "DiskUtilization", "percent", lambda: psutil.disk_usage("/").percent
)


def collect_gpu_metrics(num_of_gpus: int | None) -> None:
    """Measure memory and load of the first so many GPUs, as torch tells them."""
    for index in range(num_of_gpus or 0):
        cuda = importlib.import_module("torch").cuda  # only here: importing it takes seconds
        free, total = cuda.mem_get_info(index)
        described = [*dimension, Dimension("device_id", index)]
        system_metrics.extend(
            (
                Metric("GPUMemoryUtilization", cuda.memory_usage(index), "percent", described),
                Metric("GPUMemoryUsed", (total - free) // _MIB, "MB", described),
                Metric("GPUUtilization", cuda.utilization(index), "percent", described),
            )
        )


def collect_all(mod: types.ModuleType, num_of_gpus: int | None) -> None:
    """Call every function of a module like this one; log what is in `system_metrics` then.

    Functions whose name begins with ``_`` are left out; ``collect_gpu_metrics`` is given the number
    of GPUs, the others nothing.
    """
    system_metrics.clear()
    for name, member in sorted(vars(mod).items()):
        is_measurement = not name.startswith("_") and name != collect_all.__name__
        if isinstance(member, types.FunctionType) and is_measurement:
            measure: Callable[..., Any] = member
            measure(num_of_gpus) if name == "collect_gpu_metrics" else measure()
    for metric in system_metrics:
        logger.info("%s", metric)
    logger.info("")
