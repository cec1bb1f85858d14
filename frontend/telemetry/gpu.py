"""NVIDIA GPUs, as their driver describes them (NVML, by nvidia-ml-py).

No driver, or one that fails, is no GPU. A driver may also hang, for good when a GPU has fallen off
its bus; so questions that requests or the end of the server would wait for have a deadline.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import pynvml

from marserve.frontend.background import in_abandonable_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DEADLINE_SECONDS = 10.0


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


async def within_deadline(question: Callable[[], T], otherwise: T) -> T:
    """Ask one of the questions above; ``otherwise`` where there is no answer in time."""
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            return await in_abandonable_thread(question)
    except TimeoutError:
        logger.warning("The NVIDIA driver does not answer within %g s.", _DEADLINE_SECONDS)
        return otherwise


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
