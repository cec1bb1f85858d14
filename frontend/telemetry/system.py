"""Measures CPU, memory, disk and GPUs of the host on a timer, under TorchServe's names.

TorchServe started a Python program each time; here this process measures. A program that
``system_metrics_cmd`` names runs instead, as in TorchServe:

    command          the arguments of the server's Python interpreter
    standard input   a line with the process ids of all workers, joined by commas
    standard output  lines of metrics (`parse_metric_line`), an empty line, ``pid:bytes`` per worker
    standard error   is written to the server's log

Only metrics that metrics.yaml declares under ``ts_metrics`` are reported. The memory of workers is
not read from the output: describe measures it.
"""

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence

import psutil

from marserve.frontend.telemetry.commands import Output, run_command
from marserve.frontend.telemetry.gpu import GpuReader
from marserve.frontend.telemetry.handler_metrics import parse_metric_line
from marserve.frontend.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

#: TorchServe's own collector, if a configuration names the default.
_BUILT_IN = "ts/metrics/metric_collector.py"
_MEGABYTE = 1 << 20
_GIGABYTE = 1 << 30
_COMMAND_SECONDS = 30.0
_MAX_LOGGED_LINES = 20


class SystemProbe:
    """Measures the host every ``interval`` seconds."""

    def __init__(
        self,
        metrics: Metrics,
        interval: float,
        gpus: GpuReader,
        *,
        gpu_count: int | None = None,  # that are reported; None for all
        command: Sequence[str] = (),  # ``system_metrics_cmd``; empty to measure in this process
        pids: Callable[[], Iterable[int]] = tuple,  # of the workers
    ) -> None:
        self._metrics = metrics
        self._interval = interval
        self._gpus = gpus
        self._gpu_count = gpu_count
        self._argv = () if _BUILT_IN in command[:1] else tuple(command)
        self._pids = pids

    async def run(self) -> None:
        """Measure until cancelled."""
        psutil.cpu_percent()  # returns the load since the last call
        while True:
            await self.measure()
            await asyncio.sleep(self._interval)

    async def measure(self) -> None:
        """Measure once."""
        if self._argv:
            await self._run_command()
            return
        report = self._metrics.report_system
        for name, value in _host_figures().items():
            report(name, round(value, 2), "Host")
        gpus = () if self._gpu_count == 0 else await self._gpus.read()
        for index, gpu in enumerate(gpus[: self._gpu_count]):
            figures = {
                "GPUUtilization": gpu.utilization,
                "GPUMemoryUtilization": gpu.memory_utilization,
                "GPUMemoryUsed": gpu.memory_used,
            }
            for name, figure in figures.items():
                if figure is not None:
                    report(name, round(figure, 2), "Host", str(index))

    async def _run_command(self) -> None:
        pids = ",".join(map(str, self._pids()))
        timeout = min(self._interval, _COMMAND_SECONDS)
        try:
            output = await run_command(
                [sys.executable, *self._argv], stdin=f"{pids}\n", timeout=timeout
            )
        except (OSError, ValueError) as error:
            logger.error("system_metrics_cmd cannot be run: %s", error)  # noqa: TRY400 - the sentence is enough
            return
        self._report(output)
        if not output.is_complete:
            logger.error("system_metrics_cmd took more than %g s or 1 MiB; killed.", timeout)

    def _report(self, output: Output) -> None:
        for line in output.stderr.splitlines()[:_MAX_LOGGED_LINES]:
            logger.error("system_metrics_cmd: %s", line)
        # The workers' memory follows the empty line.
        lines = itertools.takewhile(bool, map(str.strip, output.stdout.splitlines()))
        refused = [line for line in lines if not self._report_line(line)]
        for line in refused[:_MAX_LOGGED_LINES]:
            logger.error('Failed to parse metrics line: "%s".', line)

    def _report_line(self, line: str) -> bool:
        row = parse_metric_line(line)
        if row is None:
            return False
        _, name, _, value, dimensions, _ = row
        try:
            self._metrics.report_system(name, value, *(value for _, value in dimensions))
        except ValueError:
            return False
        return True


def _host_figures() -> dict[str, float]:
    memory, disk = psutil.virtual_memory(), psutil.disk_usage("/")
    return {
        "CPUUtilization": psutil.cpu_percent(),
        "MemoryUtilization": memory.percent,
        "MemoryUsed": memory.used / _MEGABYTE,
        "MemoryAvailable": memory.available / _MEGABYTE,
        "DiskUtilization": disk.percent,
        "DiskUsage": disk.used / _GIGABYTE,
        "DiskAvailable": disk.free / _GIGABYTE,
    }
