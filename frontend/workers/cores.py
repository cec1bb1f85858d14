"""The number of cores that the workers of this server may use together.

A container with ``--cpus 2`` sees all cores of its machine; with a thread for each it uses up its
quota after a fraction of each period, and is stopped for the rest. Fractions of a core are for the
frontend.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

from marserve.backend.control_groups import MOUNTS, PROC, nested_groups


def usable_cores(proc: Path = PROC, mounts: Path = MOUNTS, affinity: int | None = None) -> int:
    """Return the number of cores that may be used, at least 1.

    ``affinity`` is the number of cores on which this process may run, by default the actual one.
    """
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    return max(1, math.floor(min([cores, *_quotas(proc, mounts)])))


def _quotas(proc: Path, mounts: Path) -> Iterator[float]:
    # In cores: those of our control group, and of the ones around it.
    for version, group in nested_groups("cpu", proc, mounts):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if version == 2:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota = (group / "cpu.cfs_quota_us").read_text()
                period = (group / "cpu.cfs_period_us").read_text()
            if quota != "max" and int(quota) > 0:
                yield int(quota) / int(period)
