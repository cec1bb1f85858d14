"""Reads NVIDIA GPUs from their driver (NVML, by nvidia-ml-py).

Without a driver, or with one that fails, there are no GPUs. A driver may also hang, without end
when a GPU has fallen off its bus. So calls have a deadline, and there is one at a time: a thread
that waits for the driver can be abandoned, but not ended.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pynvml

from marserve.backend.measuring import measure
from marserve.frontend.aio.background import in_abandonable_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

_START_SECONDS = 10.0  # an idle driver takes a second or two for each GPU
_READ_SECONDS = 3.0
_KEPT_SECONDS = 1.0


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment; None where the driver has no figure (MIG has no utilization)."""

    utilization: int | None  # percent of the time it was computing
    memory_traffic: int | None  # percent of the time its memory was read or written
    memory_used: int | None  # MiB
    memory_total: int | None  # MiB

    @property
    def memory_utilization(self) -> float | None:
        """Percent of its memory that is used."""
        if self.memory_used is None or not self.memory_total:
            return None
        return 100 * self.memory_used / self.memory_total


def count_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that CUDA would show, without importing torch; blocks."""
    present = _call(pynvml.nvmlDeviceGetCount, 0)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(name.strip() not in ("", "-1") for name in visible.split(",")))


def read_gpus() -> list[Gpu]:
    """Return all GPUs of the machine, in the driver's order; blocks."""
    return _call(lambda: [_read(number) for number in range(pynvml.nvmlDeviceGetCount())], [])


async def count_gpus_in_time() -> int:
    """Return the number of GPUs; 0 if the driver does not answer in time."""
    try:
        async with asyncio.timeout(_START_SECONDS):
            return await in_abandonable_thread(measure, "The number of GPUs", count_gpus) or 0
    except TimeoutError:
        logger.warning("The NVIDIA driver does not answer within %g s.", _START_SECONDS)
        return 0


class GpuReader:
    """Reads the GPUs in one event loop.

    Calls during a call of the driver, and within a second after it, get the same result.
    """

    def __init__(self) -> None:
        self._reading: asyncio.Task[list[Gpu]] | None = None
        self._deadline = 0.0  # of the call
        self._is_fresh_until = 0.0

    async def read(self) -> Sequence[Gpu]:
        """Return all GPUs of the machine; none if the driver does not answer in time."""
        now = asyncio.get_running_loop().time()
        reading = self._reading
        if reading is None or (reading.done() and now >= self._is_fresh_until):
            reading = self._reading = asyncio.create_task(self._read())
            self._deadline = now + _READ_SECONDS
        if not reading.done() and now < self._deadline:
            await asyncio.wait({reading}, timeout=self._deadline - now)
        return reading.result() if reading.done() else ()

    async def _read(self) -> list[Gpu]:
        loop = asyncio.get_running_loop()
        text = "The NVIDIA driver does not answer within %g s."
        warning = loop.call_later(_READ_SECONDS, logger.warning, text, _READ_SECONDS)
        try:
            gpus = await in_abandonable_thread(measure, "The use of the GPUs", read_gpus) or []
        finally:
            warning.cancel()
        self._is_fresh_until = loop.time() + _KEPT_SECONDS
        return gpus


def _call(read: Callable[[], T], otherwise: T) -> T:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return otherwise
    try:
        return read()
    except pynvml.NVMLError:
        return otherwise
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _read(number: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    rates = _unless_unknown(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    # As nvidia-smi, without the driver's own memory, which old drivers include.
    memory = _unless_unknown(
        lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    ) or _unless_unknown(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return Gpu(
        utilization=rates and rates.gpu,
        memory_traffic=rates and rates.memory,
        memory_used=memory and memory.used >> 20,
        memory_total=memory and memory.total >> 20,
    )


def _unless_unknown(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except pynvml.NVMLError:
        return None
