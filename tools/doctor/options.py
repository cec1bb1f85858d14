"""The command line of ``marserve doctor``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from marserve.tools.doctor.rules import RULES

_LONGEST = 86_400.0
_EPILOG = """exit status: 0 no finding blocks (with --strict: none is to be changed or checked, or
differs), 1 otherwise, 2 nothing could be examined. marserve doctor --compare OLD NEW compares two
servers and has a separate --help. docs/doctor.md contains examples."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="marserve doctor",
        description="Reports what works on marserve in a TorchServe setup, what does not, what "
        "differs, and what can be improved. Nothing is started or changed.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "path",
        nargs="?",
        type=Path,
        metavar="PATH",
        help="a directory or a file: archives, configuration, images, manifests (default: .)",
    )
    what.add_argument(
        "--ts-config", type=Path, metavar="FILE", help="a configuration file of this machine"
    )
    what.add_argument(
        "--url",
        metavar="URL",
        help="management address of a running server, TorchServe or marserve",
    )
    add("--load", action="store_true", help="also load each archive, in a separate process")
    add("--load-timeout", type=float, default=300.0, metavar="S", help="seconds for each (300)")
    add("--write", action="store_true", help="fix what can be fixed: shows a diff, then asks")
    add("--yes", action="store_true", help="with --write: do not ask")
    add("--image", default="", metavar="NAME", help="image that replaces TorchServe's")
    add("--json", action="store_true", help="print the findings as JSON")
    add("--strict", action="store_true", help="also exit with 1 for differences")
    add("--verbose", action="store_true", help="show all places and what works unchanged")
    add(
        "--ignore",
        action="append",
        default=[],
        choices=sorted(RULES),
        metavar="RULE",
        help="leave out a rule's findings; may be repeated",
    )
    add("--token", default="", metavar="KEY", help="with --url: management key")
    add("--key-file", type=Path, metavar="FILE", help="with --url: the server's key_file.json")
    add("--metrics-url", default="", metavar="URL", help="with --url: metrics address, if another")
    add("--insecure", action="store_true", help="with --url: trust any certificate")
    return parser


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed options; exit with status 2 if they are wrong."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.json and options.write and not options.yes:
        parser.error("--json with --write needs --yes, because it does not ask")
    if options.url is not None and (options.write or options.load):
        parser.error("--write and --load are for files, not for --url")
    if not 0 < options.load_timeout <= _LONGEST:  # also refuses nan
        parser.error("--load-timeout takes seconds above 0, up to a day")
    return options
