"""Facts about the machine that the benchmark runs on, for the reports."""

import contextlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path


def machine() -> Mapping[str, str]:
    """Return processor, number of usable cores, system and Python version by name."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):  # a container may hide it
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
