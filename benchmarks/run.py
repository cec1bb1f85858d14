"""Measures marserve against bare loops on the same machine and prints one table of ratios.

    python benchmarks/run.py [PIECE ...] [--quick]

The pieces are noop, workflows, models, large, resnet, threads, stages, start, memory, soak and bad.
Without names all of them run, about twenty minutes. Absolute numbers belong to this machine at
this hour; a ratio compares runs that took turns within minutes, and its spread shows what it is
worth. Nothing here fails when a goal is missed: timing is not a test.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import bad_requests
import large
import many_models
import memory
import noop
import psutil
import report
import resnet
import soak
import stages
import start
import torch_threads
import workflows
import wrk

Piece = Callable[[Path, bool], list[report.Row]]
PIECES: dict[str, Piece] = {
    "noop": noop.measure,
    "workflows": workflows.measure,
    "models": many_models.measure,
    "large": large.measure,
    "resnet": resnet.measure,
    "threads": torch_threads.measure,
    "stages": stages.measure,
    "start": start.measure,
    "memory": memory.measure,
    "soak": soak.measure,
    "bad": bad_requests.measure,
}
# All others take the benchmarks' own generator, which can wait for whole batches.
_BY_WRK = ("models", "large")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the pieces that are named, or all."""
    options = _parser().parse_args(argv)
    pieces = options.pieces or list(PIECES)
    rows: list[report.Row] = []
    busy = 0.0
    with tempfile.TemporaryDirectory(prefix="marserve-bench-") as directory:
        for name in pieces:
            busy = max(busy, psutil.cpu_percent(interval=1))
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            workplace = Path(directory, name)
            workplace.mkdir()
            rows += PIECES[name](workplace, options.quick)
    print(report.machine(busy))
    if by_wrk := [name for name in pieces if name in _BY_WRK]:
        print(f"Load of {', '.join(by_wrk)}: {wrk.name()}.")
    print(report.table(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", choices=[*PIECES, []], help="all by default")
    parser.add_argument(
        "--quick", action="store_true", help="few and short repetitions: does it run at all?"
    )
    return parser


if __name__ == "__main__":
    main()
