"""The command line of ``marserve doctor --compare``."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from marserve.backend.profiling.comparison import TOLERANCES
from marserve.tools.doctor.comparison.answers import RULES

_LARGEST = 1e9  # the system takes no times of thousands of years
_EPILOG = """exit status: 0 the answers are the same (with --strict: nothing is to be checked or
differs), 1 they are not, 2 nothing could be compared. docs/doctor.md contains examples."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="marserve doctor --compare",
        description="Sends requests to two servers, in turn, and compares what they answer and how "
        "long it takes.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("old", metavar="OLD", help="inference address of the reference server")
    add("new", metavar="NEW", help="inference address of the server to check")
    what = parser.add_argument_group("requests")
    add = what.add_argument
    several = partial(add, action="append", default=[])
    requests = "requests: JSON lines, yaml, a HAR file, or an access log; may be repeated"
    several("--requests", type=Path, metavar="FILE", help=requests)
    bodies = "bodies: a file, a directory or a pattern; may be repeated"
    several("--input", metavar="FILE", help=bodies)
    where = what.add_mutually_exclusive_group()
    where.add_argument("--model", default="", metavar="NAME", help="model that the inputs are for")
    where.add_argument(
        "--path", default="", metavar="PATH", help="path to post them to, instead of --model"
    )
    add(
        "--content-type",
        default="",
        metavar="TYPE",
        help="of the inputs; by default by their names",
    )
    several("--header", metavar="'NAME: VALUE'", help="sent with all requests; may be repeated")
    add(
        "--limit",
        type=_count,
        default=1000,
        metavar="N",
        help="maximum of requests, selected evenly (1000)",
    )
    add("--repeat", type=_count, default=10, metavar="N", help="how often each is sent (10)")
    add("--timeout", type=_positive, default=60.0, metavar="S", help="seconds for an answer (60)")
    add("--insecure", action="store_true", help="trust any certificate")
    for which in ("old", "new"):
        add(f"--{which}-token", default="", metavar="KEY", help=f"inference key of {which.upper()}")
        key_file = f"key_file.json of {which.upper()}"
        add(f"--{which}-key-file", type=Path, metavar="FILE", help=key_file)
    add = parser.add_argument_group("criteria").add_argument
    several = partial(add, action="append", default=[])
    number = f"allowed difference of numbers ({TOLERANCES['fp32']:g})"
    add("--tolerance", type=_tolerance, default=TOLERANCES["fp32"], metavar="X", help=number)
    member = "member of JSON that is not compared; may be repeated"
    several("--ignore-member", metavar="NAME", help=member)
    header = "header that is not compared; may be repeated"
    several("--ignore-header", metavar="NAME", help=header)
    rule = f"omit a rule's findings: {', '.join(RULES)}; may be repeated"
    several("--ignore", choices=RULES, metavar="RULE", help=rule)
    ratio = "exit with 1 where NEW's median latency is more than X times OLD's"
    add("--max-ratio", type=_positive, metavar="X", help=ratio)
    add("--strict", action="store_true", help="exit with 1 for what is to be checked or differs")
    add = parser.add_argument_group("report").add_argument
    add("--json", action="store_true", help="print it as JSON")
    add("--verbose", action="store_true", help="show every difference")
    return parser


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options; exit with status 2 if they are wrong."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.path and not options.path.startswith("/"):
        parser.error("--path must begin with a slash")
    if (options.model or options.path) and not options.input:
        parser.error("--model and --path need --input")
    if wrong := [each for each in options.header if ":" not in each]:
        parser.error(f"--header {wrong[0]}: the form is 'NAME: VALUE'")
    return options


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _positive(text: str) -> float:
    if not 0 < (number := float(text)) <= _LARGEST:
        raise ValueError
    return number


def _tolerance(text: str) -> float:
    if not 0 <= (number := float(text)) < float("inf"):
        raise ValueError
    return number
