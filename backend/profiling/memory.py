"""Measures the memory that batches use, and how much is left, on the GPU or on the host.

Everything is counted from the *baseline*, what the idle model held when the object was made, so
that the figures of a batch are its own. On the host the kernel keeps the peak (``VmHWM``) and
resets it on request (``clear_refs``). If that is not permitted, a peak is that since the process
started, which errs on the safe side.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

from marserve.backend.control_groups import MOUNTS, PROC, memory_limits


class DeviceMemory:
    """The memory of a GPU, by the counters of the module ``torch.cuda``."""

    def __init__(self, cuda: Any, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self._baseline: int = cuda.memory_allocated(device)

    def reset_peak(self) -> None:
        """Start a new peak."""
        self._cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Return the most that was allocated since `reset_peak`, beyond the baseline."""
        return max(0, int(self._cuda.max_memory_allocated(self._device)) - self._baseline)

    def available(self) -> int | None:
        """Return how much can be allocated, beyond the baseline."""
        free, _ = self._cuda.mem_get_info(self._device)
        return int(free) + int(self._cuda.memory_reserved(self._device)) - self._baseline

    def release(self) -> None:
        """Free what the allocator has reserved and does not use."""
        self._cuda.empty_cache()


class HostMemory:
    """The memory of this process on a Linux machine; elsewhere nothing is known."""

    def __init__(self, proc: Path = PROC, cgroups: Path = MOUNTS) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self._baseline = self._held()

    def reset_peak(self) -> None:
        """Start a new peak, if that is permitted."""
        with contextlib.suppress(OSError):
            (self._proc / "self/clear_refs").write_text("5")  # proc(5)

    def peak(self) -> int:
        """Return the most that was held since `reset_peak`, beyond the baseline."""
        peak = _bytes_of(self._proc / "self/status", "VmHWM") or 0
        return max(0, peak - self._baseline)

    def available(self) -> int | None:
        """Return how much can be held, beyond the baseline; None if unknown."""
        available = _bytes_of(self._proc / "meminfo", "MemAvailable")
        if available is None:
            return None
        left = (group.left for group in memory_limits(self._proc, self._cgroups))
        return min([available, *left]) + self._held() - self._baseline

    def release(self) -> None:
        """Do nothing: the host keeps nothing for reuse."""

    def _held(self) -> int:
        return _bytes_of(self._proc / "self/status", "VmRSS") or 0


Memory = DeviceMemory | HostMemory


def memory_of(gpu_id: int | None) -> Memory:
    """Return the memory of a worker's GPU, or of the host if torch does not use the GPU."""
    torch: Any = sys.modules.get("torch")
    if gpu_id is not None and torch is not None and torch.cuda.is_initialized():
        return DeviceMemory(torch.cuda, gpu_id)
    return HostMemory()


def _bytes_of(file: Path, label: str) -> int | None:
    """Return a number of kB of a file in /proc as bytes; None if it does not have the label."""
    with contextlib.suppress(OSError, LookupError, ValueError):  # a value may be missing
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name == label:
                return int(value.split()[0]) * 1024
    return None
