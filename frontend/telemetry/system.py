"""CPU, memory and disk of the host, under TorchServe's names, on a timer."""

import asyncio

import psutil
from prometheus_client import Gauge

from marserve.frontend.telemetry.metrics import Metrics

_MEGABYTE = 1 << 20
_GIGABYTE = 1 << 30
_UNITS = {
    "CPUUtilization": "Percent",
    "MemoryUtilization": "Percent",
    "MemoryUsed": "Megabytes",
    "MemoryAvailable": "Megabytes",
    "DiskUtilization": "Percent",
    "DiskUsage": "Gigabytes",
    "DiskAvailable": "Gigabytes",
}


class SystemProbe:
    """Looks at the host every ``interval`` seconds.

    Args:
        metrics: Where the figures go.
        interval: Seconds between two looks.
    """

    def __init__(self, metrics: Metrics, interval: float) -> None:
        self._interval = interval
        self._gauges: dict[str, Gauge] = {
            name: metrics.host_gauge(name, unit) for name, unit in _UNITS.items()
        }

    async def run(self) -> None:
        """Look until cancelled."""
        psutil.cpu_percent()  # the first call only starts the clock of the next
        while True:
            self._look()
            await asyncio.sleep(self._interval)

    def _look(self) -> None:
        memory, disk = psutil.virtual_memory(), psutil.disk_usage("/")
        figures = {
            "CPUUtilization": psutil.cpu_percent(),
            "MemoryUtilization": memory.percent,
            "MemoryUsed": memory.used / _MEGABYTE,
            "MemoryAvailable": memory.available / _MEGABYTE,
            "DiskUtilization": disk.percent,
            "DiskUsage": disk.used / _GIGABYTE,
            "DiskAvailable": disk.free / _GIGABYTE,
        }
        for name, figure in figures.items():
            self._gauges[name].set(round(figure, 2))
