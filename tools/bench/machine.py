"""What numbers were taken on: without it they mean nothing."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path


def machine() -> Mapping[str, str]:
    """Facts about this machine, by name."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
