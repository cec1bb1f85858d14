"""``marserve doctor --compare`` from the command line to the exit status."""

import argparse
import sys
from collections.abc import Sequence
from urllib.parse import quote

from marserve.frontend.lifecycle.terminal import print_text
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.options import key_of
from marserve.tools.doctor.comparison.answers import Rules
from marserve.tools.doctor.comparison.exchange import Request, Server
from marserve.tools.doctor.comparison.options import read_options
from marserve.tools.doctor.comparison.pairs import compare_servers, slower
from marserve.tools.doctor.comparison.report import as_text, comparison_json, named
from marserve.tools.doctor.comparison.requests import read_requests
from marserve.tools.doctor.errors import DoctorError
from marserve.tools.doctor.findings import Report
from marserve.tools.doctor.report import exit_status


def main(arguments: Sequence[str]) -> int:
    """Compare two servers and return the exit status.

    Args:
        arguments: The arguments after ``doctor``, without ``--compare``.

    Raises:
        BenchError, DoctorError: Nothing can be compared.
    """
    options = read_options(arguments)
    path = f"/predictions/{quote(options.model, safe='')}" if options.model else options.path
    recorded = read_requests(
        options.requests, options.input, path, options.content_type, options.limit
    )
    if recorded.left_out:
        print_text(
            f"{len(recorded.left_out)} requests are omitted, because they may change the server: "
            f"{named(recorded.left_out, verbose=options.verbose)}",
            sys.stderr,
        )
    if recorded.sampled_from > len(recorded.requests):
        print_text(
            f"{len(recorded.requests)} of {recorded.sampled_from} requests are sent (--limit).",
            sys.stderr,
        )
    old, new = (_server(options, which) for which in ("old", "new"))
    try:
        for server in (old, new):
            _check(server)
        rules = Rules(
            options.tolerance,
            options.ignore_member,
            [name.lower() for name in options.ignore_header],
        )
        compared = compare_servers(old, new, recorded.requests, rules, options.repeat)
    finally:
        old.close()
        new.close()
    if options.max_ratio is not None:
        compared.findings += slower(compared.latencies, options.max_ratio)
    kept = [each for each in compared.findings if each.rule not in options.ignore]
    report = Report([str(each) for each in recorded.requests], kept)
    report.ignored = len(compared.findings) - len(kept)
    status = exit_status(report, strict=options.strict)
    if options.json:
        print_text(comparison_json(report, compared, (old.url, new.url), status))
    else:
        for line in as_text(report, compared, verbose=options.verbose):
            print_text(line)
    return status


def _server(options: argparse.Namespace, which: str) -> Server:
    headers = {}
    for each in options.header:
        name, _, value = each.partition(":")
        headers[name.strip()] = value.strip()
    key, file = (getattr(options, f"{which}_{name}") for name in ("token", "key_file"))
    if key := key or (file and key_of(file, "inference")):
        headers["Authorization"] = f"Bearer {key}"
    destination = Destination(getattr(options, which), verify=not options.insecure)
    return Server(destination, headers, options.timeout)


def _check(server: Server) -> None:
    """Raise DoctorError for a server that does not respond."""
    answer = server.ask(Request("GET", "/ping"))
    if answer.problem:
        raise DoctorError(f"Nothing answers at {server.url}: {answer.problem}.")
