"""The program that TorchServe ran to measure the host: ``python -m ts.metrics.metric_collector``.

It prints the host's metrics, then the memory of the processes whose ids it reads from its input.
"""

import argparse
import logging
import sys

from marserve.handlers.torchserve_api import system_metrics
from marserve.handlers.torchserve_api.process_memory_metric import check_process_mem_usage


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = argparse.ArgumentParser(prog="metric_collector", description=__doc__)
    parser.add_argument("--gpu", type=int, default=0, help="number of GPUs")
    arguments = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    system_metrics.collect_all(system_metrics, arguments.gpu)
    check_process_mem_usage(sys.stdin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
