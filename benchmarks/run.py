"""Measures marserve against bare loops on the same machine and prints one table of ratios.

    python benchmarks/run.py [noop] [models] [large] [resnet] [start] [memory] [soak] [--quick]

Without names all pieces run, about a quarter of an hour. Absolute numbers belong to this machine at
this hour; a ratio compares runs that took turns within minutes, and its spread shows what it is
worth. Nothing here fails when a goal is missed: timing is not a test.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import large
import many_models
import memory
import noop
import psutil
import report
import resnet
import soak
import start

Piece = Callable[[Path, bool], list[report.Row]]
PIECES: dict[str, Piece] = {
    "noop": noop.measure,
    "models": many_models.measure,
    "large": large.measure,
    "resnet": resnet.measure,
    "start": start.measure,
    "memory": memory.measure,
    "soak": soak.measure,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the pieces that are named, or all."""
    options = _parser().parse_args(argv)
    rows: list[report.Row] = []
    busy = 0.0
    with tempfile.TemporaryDirectory(prefix="marserve-bench-") as directory:
        for name in options.pieces or PIECES:
            busy = max(busy, psutil.cpu_percent(interval=1))
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            workplace = Path(directory, name)
            workplace.mkdir()
            rows += PIECES[name](workplace, options.quick)
    print(report.machine(busy))
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
