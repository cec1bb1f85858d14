"""How much memory the server may use: that of the machine, or of the container it runs in."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# What one kind of clients may fill with requests and answers: one part of so many.
_SHARE = 4


def usable_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that the machine has, or as many as a control group around this process allows."""
    return min([psutil.virtual_memory().total, *_limits(proc, cgroups)])


def bytes_in_flight(limit: int) -> int:
    """Bytes that requests and answers may take: the limit, or if that is 0, a share of memory."""
    return limit or usable_memory() // _SHARE


def _limits(proc: Path, cgroups: Path) -> Iterator[int]:
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, file = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Groups are nested; and a container may see its own as the root.
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            limit = _text(root / group / file).strip()
            if limit.isdecimal():  # else "max"
                yield int(limit)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
