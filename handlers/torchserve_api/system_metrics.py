"""``ts.metrics.system_metrics``: measurements of the host.

The server has its own. These are for handlers, and for modules of a ``system_metrics_cmd``, whose
functions `collect_all` calls.
"""

import importlib
import logging
import types
from collections.abc import Callable
from typing import Any

import psutil

from marserve.backend import measuring
from marserve.backend.metrics import Dimension, Metric

logger = logging.getLogger(__name__)

system_metrics: list[Metric] = []  # the measurements, the latest last
dimension = [Dimension("Level", "Host")]

_MIB, _GIB = 2**20, 2**30


def _measurement(name: str, unit: str, read: Callable[[], float]) -> Callable[[], None]:
    def measure() -> None:
        value = measuring.measure(name, read)
        if value is not None:
            system_metrics.append(Metric(name, value, unit, dimension))

    return measure


_memory, _disk = psutil.virtual_memory, psutil.disk_usage
cpu_utilization = _measurement("CPUUtilization", "percent", psutil.cpu_percent)  # since last call
memory_used = _measurement("MemoryUsed", "MB", lambda: _memory().used / _MIB)
memory_available = _measurement("MemoryAvailable", "MB", lambda: _memory().available / _MIB)
memory_utilization = _measurement("MemoryUtilization", "percent", lambda: _memory().percent)
disk_used = _measurement("DiskUsage", "GB", lambda: _disk("/").used / _GIB)
disk_available = _measurement("DiskAvailable", "GB", lambda: _disk("/").free / _GIB)
disk_utilization = _measurement("DiskUtilization", "percent", lambda: _disk("/").percent)


def collect_gpu_metrics(num_of_gpus: int | None) -> None:
    """Measure memory and load of the first ``num_of_gpus`` GPUs with torch."""
    for index in range(num_of_gpus or 0):
        cuda = importlib.import_module("torch").cuda  # importing torch takes seconds
        free, total = cuda.mem_get_info(index)
        dimensions = [*dimension, Dimension("device_id", index)]
        system_metrics.extend(
            (
                Metric("GPUMemoryUtilization", cuda.memory_usage(index), "percent", dimensions),
                Metric("GPUMemoryUsed", (total - free) // _MIB, "MB", dimensions),
                Metric("GPUUtilization", cuda.utilization(index), "percent", dimensions),
            )
        )


def collect_all(mod: types.ModuleType, num_of_gpus: int | None) -> None:
    """Call the functions of a module like this one and log `system_metrics`.

    Names that begin with ``_`` are omitted. Only ``collect_gpu_metrics`` has an argument, the
    number of GPUs.
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
