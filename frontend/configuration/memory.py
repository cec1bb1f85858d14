"""How much memory the server may use, and how much of it is left.

It is that of the machine, or of the container it runs in. Pages of files count as left: the kernel
drops them before anything is killed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from marserve.frontend.configuration.control_groups import MOUNTS, PROC, nested_groups

# What one kind of clients may fill with requests and answers: one part of so many.
_SHARE = 4


class _Files(NamedTuple):
    """What the files of a control group are called that are about memory."""

    limit: str
    used: str
    of_files: str  # beginning of the lines of ``memory.stat`` about pages of files


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = _Files("memory.max", "memory.current", "")


def usable_memory(proc: Path = PROC, cgroups: Path = MOUNTS) -> int:
    """Bytes that the machine has, or as many as a control group around this process allows."""
    limits = (limit for _, _, limit in _limits(proc, cgroups))
    return min([psutil.virtual_memory().total, *limits])


def free_memory(proc: Path = PROC, cgroups: Path = MOUNTS) -> int:
    """Bytes that are left of `usable_memory`."""
    left = [limit - _used(group, files) for group, files, limit in _limits(proc, cgroups)]
    return max(0, min([psutil.virtual_memory().available, *left]))


def bytes_in_flight(limit: int) -> int:
    """Bytes that requests and answers may take: the limit, or if that is 0, a share of memory."""
    return limit or usable_memory() // _SHARE


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Files, int]]:
    """The control groups around this process that have a limit."""
    for version, group in nested_groups("memory", proc, cgroups):
        files = _V2 if version == 2 else _V1
        limit = _text(group / files.limit).strip()
        if limit.isdecimal():  # else "max"
            yield group, files, int(limit)


def _used(group: Path, files: _Files) -> int:
    """Bytes that a control group uses, less the pages of files."""
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
