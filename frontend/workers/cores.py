"""How many cores the workers of this server may use together.

What its processes may run on (`os.sched_getaffinity`: taskset, cpusets), less what a quota of CPU
time leaves of it. A container with ``--cpus 2`` sees all cores of its machine, and with a thread
for each of them has used up its time after a fraction of each period, and stands still for the
rest. Fractions are rounded down: what is left over is the frontend's.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cores(root: Path = Path("/"), affinity: int | None = None) -> int:
    """The cores that may be used: at least 1.

    ``root`` is where ``proc`` and ``sys`` lie, ``affinity`` the number of cores to run on.
    """
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    return max(1, math.floor(min([cores, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """The quotas in force, in cores: of our control group, and of each one around it."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            groups.update(dict.fromkeys(controllers.split(","), group))
    mounts = root / "sys/fs/cgroup"
    for directory in _nested(mounts, groups.get("")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (directory / "cpu.max").read_text().split()
            if quota != "max":
                yield int(quota) / int(period)
    # Version 1; the controllers may be mounted together, and "cpu" need not be a link to that.
    for mount in ("cpu", "cpu,cpuacct"):
        for directory in _nested(mounts / mount, groups.get("cpu")):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                microseconds = int((directory / "cpu.cfs_quota_us").read_text())
                if microseconds > 0:
                    yield microseconds / int((directory / "cpu.cfs_period_us").read_text())


def _nested(mount: Path, group: str | None) -> Iterator[Path]:
    """The directories of a group and of those around it.

    In a container the group may have the host's name, and be mounted at the top: what is not there
    is passed over, and the top is always among them.
    """
    if group is None:
        return
    inside = PurePosixPath(group.lstrip("/"))
    if ".." not in inside.parts:  # of a group outside our namespace
        for each in (inside, *inside.parents):
            yield mount / each
        return
    yield mount
