"""The memory that the server may use, and the part of it that is free.

It is that of the machine, or of the container. Pages of files count as free: the kernel drops them
before it ends a process.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from marserve.frontend.configuration.control_groups import MOUNTS, PROC, nested_groups

_SHARE = 4  # one part in so many is for the requests and answers of a listener


class _Files(NamedTuple):
    """The names of a control group's files."""

    limit: str
    used: str
    of_files: str  # the prefix of the lines of ``memory.stat`` about pages of files


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = _Files("memory.max", "memory.current", "")


def usable_memory(proc: Path = PROC, cgroups: Path = MOUNTS) -> int:
    """Return the bytes of the machine, or those that a control group allows."""
    limits = (limit for _, _, limit in _limits(proc, cgroups))
    return min([psutil.virtual_memory().total, *limits])


def free_memory(proc: Path = PROC, cgroups: Path = MOUNTS) -> int:
    """Return the bytes that are free of `usable_memory`."""
    left = [limit - _used(group, files) for group, files, limit in _limits(proc, cgroups)]
    return max(0, min([psutil.virtual_memory().available, *left]))


def bytes_in_flight(limit: int) -> int:
    """Return the limit of requests and answers in bytes; 0 stands for a share of memory."""
    return limit or usable_memory() // _SHARE


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Files, int]]:
    for version, group in nested_groups("memory", proc, cgroups):
        files = _V2 if version == 2 else _V1
        limit = _text(group / files.limit).strip()
        if limit.isdecimal():  # else "max"
            yield group, files, int(limit)


def _used(group: Path, files: _Files) -> int:
    used = _text(group / files.used).strip()
    lines = (line.split() for line in _text(group / "memory.stat").splitlines())
    names = {f"{files.of_files}{kind}_file" for kind in ("active", "inactive")}
    of_files = sum(int(value) for name, value in lines if name in names)
    return max(0, int(used) - of_files) if used.isdecimal() else 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
