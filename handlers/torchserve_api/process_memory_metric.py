"""How much memory processes use: TorchServe's ``ts.metrics.process_memory_metric``."""

import logging
from typing import TextIO

import psutil

logger = logging.getLogger(__name__)


def get_cpu_usage(pid: str | int) -> int:
    """Return the resident bytes of a process, 0 where there is none of that id."""
    try:
        return int(psutil.Process(int(pid)).memory_info().rss)
    except (psutil.Error, ValueError):
        logger.exception("Failed get process for pid: %s", pid)
        return 0


def check_process_mem_usage(stdin: TextIO) -> None:
    """Log ``id:bytes`` of each process whose id is in the next line, joined by commas."""
    for pid in filter(None, stdin.readline().strip().split(",")):
        logger.info("%s:%d", pid, get_cpu_usage(pid))
