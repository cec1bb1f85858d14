"""``python -m ts.metrics.metric_collector``: TorchServe's program that measures the host.

It prints the host's metrics, then the memory of the processes whose ids are in its input.
"""

import argparse
import logging
import sys
from typing import TextIO

import psutil

from marserve.backend import measuring
from marserve.handlers.torchserve_api import system_metrics

logger = logging.getLogger(__name__)


def get_cpu_usage(pid: str | int) -> int:
    """Return the resident bytes of a process, or 0 if it does not exist."""
    try:
        return int(psutil.Process(int(pid)).memory_info().rss)
    except (psutil.Error, OSError, LookupError, RuntimeError, ValueError):
        logger.exception("Failed get process for pid: %s", pid)
        return 0


def check_process_mem_usage(stdin: TextIO) -> None:
    """Log ``id:bytes`` for each process id of the next line, which commas separate."""
    for pid in filter(None, stdin.readline().strip().split(",")):
        logger.info("%s:%d", pid, get_cpu_usage(pid))


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(prog="metric_collector", description=__doc__)
    parser.add_argument("--gpu", type=int, default=0, help="number of GPUs")
    arguments = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    measuring.logger.addHandler(logging.StreamHandler())  # to standard error: it is no metric
    measuring.logger.propagate = False
    system_metrics.collect_all(system_metrics, arguments.gpu)
    check_process_mem_usage(sys.stdin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
