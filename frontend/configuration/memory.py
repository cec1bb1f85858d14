"""The memory that the server may use, and the part of it that is free.

It is that of the machine, or of the container. Pages of files count as free: the kernel drops them
before it ends a process.
"""

from pathlib import Path

from marserve.backend.control_groups import MOUNTS, PROC, memory_limits
from marserve.frontend.measurements import machine_memory, total_memory

_UNKNOWN = 4 << 30  # assumed for a machine whose memory nothing tells
_SHARE = 4  # requests and answers of a listener may use 1/4 of the memory


def usable_memory(proc: Path = PROC, cgroups: Path = MOUNTS) -> int:
    """Return the bytes of the machine, or those that a control group allows."""
    known = [group.limit for group in memory_limits(proc, cgroups)]
    if total := total_memory():
        known.append(total)
    return min(known, default=_UNKNOWN)


def free_memory(proc: Path = PROC, cgroups: Path = MOUNTS) -> int | None:
    """Return the bytes that are free of `usable_memory`; None if unknown."""
    known = [group.left for group in memory_limits(proc, cgroups)]
    if memory := machine_memory():
        known.append(memory.available)
    return min(known, default=None)


def bytes_in_flight(limit: int) -> int:
    """Return the limit of requests and answers in bytes; 0 means a share of memory."""
    return limit or usable_memory() // _SHARE
