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

import page
import psutil
import report
import results
import roster
import venvs
import wrk
from cases import CASES, OURS, PACE_CASE, Case
from contest import Contest, Results, Runs
from contract import Peer


def main(argv: Sequence[str] | None = None) -> int:
    """Install, or compare; the exit status."""
    options = _options(argv)
    wanted = {OURS, *(options.peers or [peer.name for peer in roster.peers()])}
    peers = [peer for peer in roster.peers() if peer.name in wanted]
    if options.install:
        return _install(peers, options.cache)
    busy = psutil.cpu_percent(interval=1)
    versions = _installed(peers, options.cache)
    if options.peers and len(versions) < len(peers):
        return 1
    cases = [case for case in CASES if not options.cases or case.key in options.cases]
    runs = Runs(1, 1, 1) if options.quick else Runs(options.rounds, options.seconds)
    pythons = {peer: venvs.python(peer, options.cache) for peer in versions}
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        outcome = Contest(pythons, Path(directory), runs).hold(cases)
    told = page.Told(
        report.machine(busy),
        wrk.name(),
        "python benchmarks/peers " + " ".join(sys.argv[1:] if argv is None else argv),
        versions,
        [failure.partition("\n")[0] for failure in outcome.failures],
    )
    _tell(cases, outcome, told, options.write)
    return 1 if outcome.failures else 0


def _install(peers: Sequence[Peer], cache: Path) -> int:
    """Install what is missing; the exit status says whether all went well."""
    missing = [peer for peer in peers if not venvs.install(peer, cache)]
    return 1 if missing else 0


def _installed(peers: Sequence[Peer], cache: Path) -> dict[Peer, str]:
    """The versions of those that are there; says who is not."""
    versions = {peer: venvs.version(peer, cache) for peer in peers}
    for peer, version in versions.items():
        if not version:
            print(f"{peer.name} is not installed (see --install)", file=sys.stderr)
    return {peer: version for peer, version in versions.items() if version}


def _tell(cases: Sequence[Case], outcome: Results, told: page.Told, path: Path | None) -> None:
    versions = ", ".join(f"{peer.name} {version}" for peer, version in told.versions.items())
    print(f"{told.machine}\n{told.load}; {versions}\n\n{results.console(cases, outcome.turns)}")
    for failure in outcome.failures:
        print(failure, file=sys.stderr)
    if path is not None:
        import plot  # matplotlib is not needed to measure

        text = page.renew(path.read_text("utf-8"), page.generate(cases, outcome.turns, told))
        path.write_text(text, "utf-8")
        plot.draw(cases, outcome.turns, page.picture(path))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--install", action="store_true", help="make what environments are missing")
    parser.add_argument("--cache", type=Path, default=venvs.cache(), help="where they lie")
    names = [peer.name for peer in roster.peers()]
    parser.add_argument("--peers", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    keys = [case.key for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=keys, metavar="CASE", help=", ".join(keys))
    parser.add_argument("--rounds", type=_positive, default=3, help="turns of each (3)")
    parser.add_argument("--seconds", type=_positive, default=2, help="of each turn (2)")
    parser.add_argument("--quick", action="store_true", help="one turn of a second each")
    parser.add_argument("--write", type=_page, metavar="PAGE", help="the page to renew")
    return parser


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(argv)
    by_given_rate = {case.key for case in CASES if not case.by_rate}
    if options.cases and by_given_rate & {*options.cases} and PACE_CASE not in options.cases:
        parser.error(f"{', '.join(by_given_rate)} takes its load from {PACE_CASE}: name both")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _page(name: str) -> Path:
    """A page that can be renewed: better told before the run than after it."""
    path = Path(name)
    try:
        page.renew(path.read_text("utf-8"), "")
    except (OSError, page.PageUnfit) as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from None
    return path


if __name__ == "__main__":
    sys.exit(main())
