"""All measurements of the host and its processes by psutil; None for what is unknown.

No other module of the frontend measures by psutil, so that no blank file of /proc ends a start or a
request (`backend.measuring`).
"""

import os
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import psutil

from marserve.backend.measuring import measure

T = TypeVar("T")

#: What psutil raises for a process that has ended, and for blank or hidden files of /proc.
UNREADABLE = (psutil.Error, OSError, LookupError, RuntimeError, TypeError, ValueError)


class Memory(NamedTuple):
    """The memory of the machine in bytes."""

    total: int
    available: int
    used: int

    @property
    def percent(self) -> float:
        """The share that is not available."""
        return 100 * (self.total - self.available) / self.total


class Disk(NamedTuple):
    """A file system in bytes; the share is that of what unprivileged users may use."""

    used: int
    free: int
    percent: float


class ProcessUse(NamedTuple):
    """The use of the host by a process."""

    status: str
    resident: int  # bytes
    seconds: float  # of processor time so far
    at: float  # monotonic time


class ProcessorTimes(NamedTuple):
    """The seconds of all processors since the boot."""

    total: float
    idle: float


def machine_memory() -> Memory | None:
    """Return the memory of the machine."""

    def read() -> Memory:
        memory = psutil.virtual_memory()
        return Memory(memory.total, memory.available, memory.used)

    return measure("The memory of the machine", read)


def total_memory() -> int | None:
    """Return the bytes of the machine, also without /proc."""
    if memory := machine_memory():
        return memory.total
    pages = measure("The number of pages", lambda: os.sysconf("SC_PHYS_PAGES"))
    return pages * os.sysconf("SC_PAGE_SIZE") if pages and pages > 0 else None


def disk_of(path: str) -> Disk | None:
    """Return the use of a file system."""

    def read() -> Disk:
        disk = psutil.disk_usage(path)
        return Disk(disk.used, disk.free, disk.percent)

    return measure(f"The use of the disk of {path}", read)


def processor_count() -> int | None:
    """Return the number of logical processors."""
    return measure("The number of processors", psutil.cpu_count)


def processor_times() -> ProcessorTimes | None:
    """Return the seconds that the processors were busy and idle."""

    def read() -> ProcessorTimes:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return ProcessorTimes(sum(times[:8]), idle)  # those of guests are part of others

    return measure("The load of the processors", read)


class ProcessorLoad:
    """The load of the processors since the last call; psutil's own would be shared by all."""

    def __init__(self) -> None:
        self._before = processor_times()

    def percent(self) -> float | None:
        """Return the percentage since the last call."""
        before, now = self._before, processor_times()
        self._before = now
        if before is None or now is None:
            return None
        total = now.total - before.total
        return round(100 * (1 - (now.idle - before.idle) / total), 1) if total > 0 else 0.0


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None also if it has ended."""
    return _of_process(pid, "memory", lambda process: int(process.memory_info().rss))


def process_use(pid: int) -> ProcessUse | None:
    """Return the use of the host by a process; None also if it has ended."""

    def read(process: psutil.Process) -> ProcessUse:
        with process.oneshot():
            status, memory = process.status(), process.memory_info().rss
            return ProcessUse(status, memory, sum(process.cpu_times()[:2]), time.monotonic())

    return _of_process(pid, "use of the host", read)


def _of_process(pid: int, what: str, read: Callable[[psutil.Process], T]) -> T | None:
    def read_living() -> T | None:
        try:
            return read(psutil.Process(pid))
        except psutil.NoSuchProcess:
            return None

    return measure(f"The {what} of a process", read_living)
