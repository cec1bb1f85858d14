"""Measures the memory that batches use, and how much is left, on the GPU or on the host.

Everything is counted from the *baseline*, what the idle model held when the object was made, so
that the figures of a batch are its own. On the host the kernel keeps the peak (``VmHWM``) and
resets it on request (``clear_refs``). If that is not permitted, a peak is that since the process
started, which errs on the safe side.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

_RESET_PEAK = "5"  # proc(5), /proc/pid/clear_refs
_KIB = 1024


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

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._own = proc / "self"
        self._machine = proc / "meminfo"
        self._cgroups = cgroups
        self._baseline = self._held()

    def reset_peak(self) -> None:
        """Start a new peak, if that is permitted."""
        with contextlib.suppress(OSError):
            (self._own / "clear_refs").write_text(_RESET_PEAK)

    def peak(self) -> int:
        """Return the most that was held since `reset_peak`, beyond the baseline."""
        return max(0, (_figure(self._own / "status", "VmHWM:", _KIB) or 0) - self._baseline)

    def available(self) -> int | None:
        """Return how much can be held, beyond the baseline; None if unknown."""
        available = _figure(self._machine, "MemAvailable:", _KIB)
        if available is None:
            return None
        return min([available, *self._permitted()]) + self._held() - self._baseline

    def release(self) -> None:
        """Do nothing: the host keeps nothing for reuse."""

    def _held(self) -> int:
        return _figure(self._own / "status", "VmRSS:", _KIB) or 0

    def _permitted(self) -> Iterator[int]:
        """Yield what each control group around this process still permits."""
        for line in _lines(self._own / "cgroup"):
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _left_in_groups(_V2, self._cgroups, path)
            elif "memory" in controllers.split(","):
                yield from _left_in_groups(_V1, self._cgroups / "memory", path)


Memory = DeviceMemory | HostMemory


def memory_of(gpu_id: int | None) -> Memory:
    """Return the memory of a worker's GPU, or of the host if torch does not use the GPU."""
    torch: Any = sys.modules.get("torch")
    if gpu_id is not None and torch is not None and torch.cuda.is_initialized():
        return DeviceMemory(torch.cuda, gpu_id)
    return HostMemory()


# The files of limit and usage, and the field of memory.stat for the part of the usage that the
# kernel drops first: pages of files that have not been used for a while.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_V2 = "memory.max", "memory.current", "inactive_file"


def _left_in_groups(names: tuple[str, str, str], root: Path, path: str) -> Iterator[int]:
    """Yield what a group and those around it permit; a container may see its own as the root."""
    limit_name, usage_name, cache_name = names
    inner = PurePosixPath(path.lstrip("/"))
    for group in (root / inner, *(root / outer for outer in inner.parents)):
        limit, usage = _figure(group / limit_name), _figure(group / usage_name)
        if limit is not None and usage is not None:
            yield max(0, limit - usage + (_figure(group / "memory.stat", cache_name) or 0))


def _figure(file: Path, label: str = "", unit: int = 1) -> int | None:
    """Return the number on the line that begins with a label; None if there is none."""
    for line in _lines(file):
        words = line.split()
        if label and words[:1] == [label]:
            words = words[1:]
        elif label:
            continue
        return int(words[0]) * unit if words and words[0].isdecimal() else None
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
