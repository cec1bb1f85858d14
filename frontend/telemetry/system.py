"""Measures CPU, memory, disk and GPUs of the host on a timer, under TorchServe's names.

TorchServe started a Python program each time; here this process measures. A program that
``system_metrics_cmd`` names runs instead, as in TorchServe:

    command          the arguments of the server's Python interpreter
    standard input   a line with the process ids of all workers, joined by commas
    standard output  lines of metrics (`parse_metric_line`), an empty line, ``pid:bytes`` per worker
    standard error   is written to the server's log

Only metrics that metrics.yaml declares under ``ts_metrics`` are reported.
"""

import asyncio
import contextlib
import itertools
import logging
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from marserve.frontend.measurements import ProcessorLoad, disk_of, machine_memory
from marserve.frontend.process_group import ProcessGroup
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
_MAX_BYTES = 1 << 20
_STDIN, _STDOUT, _STDERR = range(3)
# A process ends within that after SIGKILL, unless it hangs in the kernel.
_END_SECONDS = 5.0


@dataclass(eq=False)
class SystemProbe:
    """Measures the host every ``interval`` seconds."""

    metrics: Metrics
    interval: float
    gpus: GpuReader
    gpu_count: int | None = None  # that are reported; None for all
    command: Sequence[str] = ()  # ``system_metrics_cmd``; empty to measure in this process
    pids: Callable[[], Iterable[int]] = tuple  # of the workers
    _processors: ProcessorLoad = field(default_factory=ProcessorLoad, init=False)

    async def run(self) -> None:
        """Measure until cancelled."""
        self._processors = ProcessorLoad()
        while True:
            await self.measure()
            await asyncio.sleep(self.interval)

    async def measure(self) -> None:
        """Measure once."""
        if self.command and self.command[0] != _BUILT_IN:
            await self._run_command()
            return
        report = self.metrics.report_system
        for name, value in _host_figures(self._processors.percent()).items():
            report(name, None if value is None else round(value, 2), "Host")
        gpus = () if self.gpu_count == 0 else await self.gpus.read()
        for index, gpu in enumerate(gpus[: self.gpu_count]):
            figures = {
                "GPUUtilization": gpu.utilization,
                "GPUMemoryUtilization": gpu.memory_utilization,
                "GPUMemoryUsed": gpu.memory_used,
            }
            for name, figure in figures.items():
                rounded = None if figure is None else round(figure, 2)
                report(name, rounded, "Host", str(index))

    async def _run_command(self) -> None:
        pids = ",".join(map(str, self.pids()))
        timeout = min(self.interval, _COMMAND_SECONDS)
        try:
            argv = [sys.executable, *self.command]
            output = await run_command(argv, stdin=f"{pids}\n", timeout=timeout)
        except (OSError, ValueError) as error:
            logger.error("system_metrics_cmd cannot be run: %s", error)  # noqa: TRY400 - the sentence is enough
            return
        self._report(output)
        if not output.is_complete:
            logger.error("system_metrics_cmd took more than %g s or 1 MiB; killed.", timeout)

    def _report(self, output: "Output") -> None:
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
            self.metrics.report_system(name, value, *(value for _, value in dimensions))
        except ValueError:
            return False
        return True


def _host_figures(load: float | None) -> dict[str, float | None]:
    """Return the figures of the host, None where unknown; ``load`` is that of the processors."""
    memory, disk = machine_memory(), disk_of("/")
    return {
        "CPUUtilization": load,
        "MemoryUtilization": memory and memory.percent,
        "MemoryUsed": memory and memory.used / _MEGABYTE,
        "MemoryAvailable": memory and memory.available / _MEGABYTE,
        "DiskUtilization": disk and disk.percent,
        "DiskUsage": disk and disk.used / _GIGABYTE,
        "DiskAvailable": disk and disk.free / _GIGABYTE,
    }


@dataclass(frozen=True)
class Output:
    """The output of a program; complete if it closed both files in time and within the limit."""

    stdout: str
    stderr: str
    is_complete: bool


async def run_command(argv: Sequence[str], *, stdin: str = "", timeout: float) -> Output:
    """Run a program for ``timeout`` seconds at most; at the end it and its children are killed.

    asyncio's streams cannot be used: their `wait` waits for pipes to be closed, which a paused
    reader does not notice. Raises OSError if it cannot be started.
    """
    loop = asyncio.get_running_loop()
    transport, listener = await loop.subprocess_exec(_Listener, *argv, start_new_session=True)
    group = ProcessGroup(transport.get_pid())
    try:
        with contextlib.suppress(OSError, RuntimeError):  # uvloop's, if its input is closed
            pipe = cast("asyncio.WriteTransport", transport.get_pipe_transport(_STDIN))
            pipe.write(stdin.encode())
            pipe.write_eof()
        await asyncio.wait({listener.complete}, timeout=timeout)
        is_complete = listener.complete.done() and listener.complete.result()
        stdout, stderr = (data.decode(errors="backslashreplace") for data in listener.written)
        return Output(stdout, stderr, is_complete)
    finally:
        group.send(signal.SIGKILL)
        await asyncio.wait({listener.exited}, timeout=_END_SECONDS)
        group.close()
        transport.close()


class _Listener(asyncio.SubprocessProtocol):
    """Collects the output of a program."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        #: True when it has closed both outputs, False when it has written too much.
        self.complete: asyncio.Future[bool] = loop.create_future()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.written = (bytearray(), bytearray())
        self._open = {_STDOUT, _STDERR}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        written = self.written[fd - _STDOUT]
        rest = _MAX_BYTES - len(written)
        written += data[:rest]
        if len(data) > rest:
            self._finish(is_complete=False)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002 - the loop's signature
        self._open.discard(fd)
        if not self._open:
            self._finish(is_complete=True)

    def process_exited(self) -> None:
        self.exited.set_result(None)

    def _finish(self, *, is_complete: bool) -> None:
        if not self.complete.done():
            self.complete.set_result(is_complete)
