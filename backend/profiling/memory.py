"""Measures the memory that batches take, and how much is left, on the GPU or on the host.

Everything is counted from the *baseline*, what the idle model held when the gauge was made, so that
the figures of a batch are its own. On the host the kernel keeps the peak (``VmHWM``), and forgets
it on demand (``clear_refs``); where that is not allowed, a peak is that since the process began,
which errs to the safe side.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

_FORGET_PEAK = "5"  # proc(5), /proc/pid/clear_refs
_KIB = 1024


class Memory(Protocol):
    """What batches take of one kind of memory, in bytes."""

    def watch(self) -> None:
        """Forget the peak so far."""

    def peak(self) -> int:
        """Return the most that was held at once since `watch`, beyond the baseline."""

    def room(self) -> int | None:
        """Return how much could be held, beyond the baseline; None where nobody knows."""

    def release(self) -> None:
        """Give back what is kept only to be used again."""


def memory_of(gpu_id: int | None) -> Memory:
    """Return the memory that a worker's batches live in: its GPU's, None on the CPU.

    A handler that does not use its GPU through torch is measured on the host.
    """
    torch: Any = sys.modules.get("torch")
    if gpu_id is not None and torch is not None and torch.cuda.is_initialized():
        return DeviceMemory(torch.cuda, gpu_id)
    return HostMemory()


class DeviceMemory:
    """Memory of a GPU, as the allocator of the module ``torch.cuda`` counts it."""

    def __init__(self, cuda: Any, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self._baseline: int = cuda.memory_allocated(device)

    def watch(self) -> None:
        """See `Memory.watch`."""
        self._cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """See `Memory.peak`."""
        return max(0, int(self._cuda.max_memory_allocated(self._device)) - self._baseline)

    def room(self) -> int | None:
        """See `Memory.room`: what is free on the device, and what the allocator has in reserve."""
        free, _ = self._cuda.mem_get_info(self._device)
        return int(free) + int(self._cuda.memory_reserved(self._device)) - self._baseline

    def release(self) -> None:
        """See `Memory.release`."""
        self._cuda.empty_cache()


class HostMemory:
    """Memory of this process on a Linux machine; elsewhere nothing is known of it."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._own = proc / "self"
        self._machine = proc / "meminfo"
        self._cgroups = cgroups
        self._baseline = self._held()

    def watch(self) -> None:
        """See `Memory.watch`."""
        with contextlib.suppress(OSError):
            (self._own / "clear_refs").write_text(_FORGET_PEAK)

    def peak(self) -> int:
        """See `Memory.peak`."""
        return max(0, (_figure(self._own / "status", "VmHWM:", _KIB) or 0) - self._baseline)

    def room(self) -> int | None:
        """See `Memory.room`: what the machine has available, less where a container allows less."""
        available = _figure(self._machine, "MemAvailable:", _KIB)
        if available is None:
            return None
        return min([available, *self._allowed()]) + self._held() - self._baseline

    def release(self) -> None:
        """See `Memory.release`: there is nothing of the kind."""

    def _held(self) -> int:
        return _figure(self._own / "status", "VmRSS:", _KIB) or 0

    def _allowed(self) -> Iterator[int]:
        """What each control group around this process still allows it."""
        for line in _lines(self._own / "cgroup"):
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _allowed_by(_V2, self._cgroups, path)
            elif "memory" in controllers.split(","):
                yield from _allowed_by(_V1, self._cgroups / "memory", path)


# The files with the limit and the usage, and the field of memory.stat with the share of the usage
# that the kernel would drop first: pages of files that nobody has used for a while.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_V2 = "memory.max", "memory.current", "inactive_file"


def _allowed_by(names: tuple[str, str, str], root: Path, path: str) -> Iterator[int]:
    """What the group and those around it leave; a container may see its own as the root."""
    limit_name, usage_name, cache_name = names
    inner = PurePosixPath(path.lstrip("/"))
    for group in (root / inner, *(root / outer for outer in inner.parents)):
        limit, usage = _figure(group / limit_name), _figure(group / usage_name)
        if limit is not None and usage is not None:
            yield max(0, limit - usage + (_figure(group / "memory.stat", cache_name) or 0))


def _figure(file: Path, label: str = "", unit: int = 1) -> int | None:
    """The number on the line that begins with a label; None where there is none."""
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
