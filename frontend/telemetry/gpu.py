"""NVIDIA GPUs, as their driver describes them (NVML, by nvidia-ml-py).

No driver, or one that fails, is no GPU. A driver may also hang, for good when a GPU has fallen off
its bus; so questions have a deadline, and while one is not answered, no other is asked: a thread
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

from marserve.frontend.aio.background import in_abandonable_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

_START_SECONDS = 10.0  # a driver that nobody uses takes a second or two for each GPU
_READ_SECONDS = 3.0
_KEPT_SECONDS = 1.0


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment; None for what it has no figure of (a MIG share has no utilization)."""

    utilization: int | None  # percent of the time it was computing
    memory_traffic: int | None  # percent of the time its memory was read or written
    memory_used: int | None  # MiB
    memory_total: int | None  # MiB

    @property
    def memory_utilization(self) -> float | None:
        """Percent of its memory."""
        if self.memory_used is None or not self.memory_total:
            return None
        return 100 * self.memory_used / self.memory_total


def count_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Count the GPUs that CUDA would show, without importing torch; blocks."""
    present = _ask(pynvml.nvmlDeviceGetCount, 0)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(name.strip() not in ("", "-1") for name in visible.split(",")))


def read_gpus() -> list[Gpu]:
    """All GPUs of the machine, in the driver's order; blocks."""
    return _ask(lambda: [_read(number) for number in range(pynvml.nvmlDeviceGetCount())], [])


async def count_gpus_in_time() -> int:
    """Count the GPUs; none where the driver does not answer in time."""
    try:
        async with asyncio.timeout(_START_SECONDS):
            return await in_abandonable_thread(count_gpus)
    except TimeoutError:
        logger.warning("The NVIDIA driver does not answer within %g s.", _START_SECONDS)
        return 0


class GpuReader:
    """Reads the GPUs for whoever wants to know; for one event loop.

    All who ask while the driver is asked get the same answer, and so do those who ask within a
    second of it.
    """

    def __init__(self) -> None:
        self._reading: asyncio.Task[list[Gpu]] | None = None
        self._deadline = 0.0  # for the answer
        self._is_fresh_until = 0.0

    async def read(self) -> Sequence[Gpu]:
        """All GPUs of the machine; none where the driver does not answer in time."""
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
        words = "The NVIDIA driver does not answer within %g s."
        complaint = loop.call_later(_READ_SECONDS, logger.warning, words, _READ_SECONDS)
        try:
            gpus = await in_abandonable_thread(read_gpus)
        finally:
            complaint.cancel()
        self._is_fresh_until = loop.time() + _KEPT_SECONDS
        return gpus


def _ask(question: Callable[[], T], otherwise: T) -> T:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return otherwise
    try:
        return question()
    except pynvml.NVMLError:
        return otherwise
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _read(number: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    rates = _unless_unknown(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    # As nvidia-smi does, without what the driver keeps for itself; old drivers count that in.
    memory = _unless_unknown(
        lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    ) or _unless_unknown(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return Gpu(
        utilization=rates and rates.gpu,
        memory_traffic=rates and rates.memory,
        memory_used=memory and memory.used >> 20,
        memory_total=memory and memory.total >> 20,
    )


def _unless_unknown(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except pynvml.NVMLError:
        return None
