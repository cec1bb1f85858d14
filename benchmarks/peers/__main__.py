"""marserve side by side with other model servers, on this machine, in one run.

    python benchmarks/peers --install          once: an environment for each, some gigabytes
    python benchmarks/peers [--quick]          compare those that are installed
    python benchmarks/peers --write PAGE       and put tables and plot into a page

Ratios compare runs that took turns within a minute; their spread shows what they are worth. A peer
that fails is named at the end, with the end of its log, and the exit status is 1. A goal that is
missed is no failure.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import psutil
import report
import results
import roster
import venvs
import wrk
from cases import CASES
from contest import Contest, Runs


def main(argv: Sequence[str] | None = None) -> int:
    """Install, or compare; the exit status."""
    options = _parser().parse_args(argv)
    peers = [peer for peer in roster.peers() if not options.peers or peer.name in options.peers]
    if options.install:
        for peer in peers:
            venvs.install(peer, options.cache)
        return 0
    busy = psutil.cpu_percent(interval=1)
    versions = {peer: venvs.version(peer, options.cache) for peer in peers}
    for peer in peers:
        if not versions[peer]:
            print(f"{peer.name} is not installed: left out (--install)", file=sys.stderr)
    installed = {peer: venvs.python(peer, options.cache) for peer in peers if versions[peer]}
    cases = [case for case in CASES if not options.cases or case.key in options.cases]
    runs = Runs(1, 1) if options.quick else Runs(options.rounds, options.seconds)
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        outcome = Contest(installed, Path(directory), runs).hold(cases)
    print(report.machine(busy))
    print(f"{wrk.name()}; " + ", ".join(f"{peer.name} {versions[peer]}" for peer in installed))
    print("\n" + results.console(cases, outcome.turns))
    for failure in outcome.failures:
        print(failure, file=sys.stderr)
    return 1 if outcome.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--install", action="store_true", help="make what environments are missing")
    parser.add_argument("--cache", type=Path, default=venvs.cache(), help="where they lie")
    names = [peer.name for peer in roster.peers()]
    parser.add_argument("--peers", nargs="+", choices=names, metavar="NAME", help="; ".join(names))
    keys = [case.key for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=keys, metavar="CASE", help="; ".join(keys))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (3)")
    parser.add_argument("--seconds", type=int, default=3, help="of each turn (3)")
    parser.add_argument("--quick", action="store_true", help="one turn of a second each")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page to renew")
    return parser


if __name__ == "__main__":
    sys.exit(main())
