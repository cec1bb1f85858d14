"""The control groups of this process, which limit it in a container."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC, MOUNTS = Path("/proc"), Path("/sys/fs/cgroup")

# Files of limit and usage, and how the fields of memory.stat about pages of files begin.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
_V2 = "memory.max", "memory.current", ""


class MemoryLimit(NamedTuple):
    """How many bytes a control group permits, and how many of these are left."""

    limit: int
    left: int


def memory_limits(proc: Path = PROC, mounts: Path = MOUNTS) -> Iterator[MemoryLimit]:
    """Yield the limits of memory around this process.

    Pages of files count as left: the kernel drops them before anything is killed.
    """
    for version, group in nested_groups("memory", proc, mounts):
        limit_file, used_file, prefix = _V2 if version == 2 else _V1
        limit, used = _text(group / limit_file).strip(), _text(group / used_file).strip()
        if not limit.isdecimal():  # "max"
            continue
        lines = (line.split() for line in _text(group / "memory.stat").splitlines())
        names = {f"{prefix}{kind}_file" for kind in ("active", "inactive")}
        pairs = [pair for pair in lines if len(pair) == 2 and pair[0] in names]
        of_files = sum(int(value) for _, value in pairs if value.isdecimal())
        held = max(0, int(used) - of_files) if used.isdecimal() else 0
        yield MemoryLimit(int(limit), max(0, int(limit) - held))


def nested_groups(
    controller: str, proc: Path = PROC, mounts: Path = MOUNTS
) -> Iterator[tuple[int, Path]]:
    """Yield the version and the directory of this process's control group and those around it.

    Directories may be missing: in a container the group may have the host's name, and be mounted at
    the top, which is always among them. ``controller`` is a name of version 1, such as ``memory``.
    """
    for line in _text(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        group = PurePosixPath(name.lstrip("/"))
        if ".." in group.parts:  # outside our namespace
            group = PurePosixPath()
        if rest and not controllers:
            roots, version = [mounts], 2
        elif controller in controllers.split(","):
            # Controllers may be mounted together, and the link with a single name may be missing.
            roots, version = list(dict.fromkeys([mounts / controller, mounts / controllers])), 1
        else:
            continue
        for root in roots:
            for each in (group, *group.parents):
                yield version, root / each


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):  # ValueError: no text
        return ""
