"""Send each request to both servers repeatedly and collect the differences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from marserve.tools.bench.client import Answer
from marserve.tools.doctor.comparison.answers import RULES, Mismatch, Rules, differences
from marserve.tools.doctor.comparison.exchange import Request, Server
from marserve.tools.doctor.comparison.latency import Latencies
from marserve.tools.doctor.findings import Finding, Place

_DO = {
    "unsteady": "It cannot be compared: fix the handler's seed, or exclude it by "
    "--ignore-member or --ignore-header.",
}
_GIVEN_UP = 10
PAGE = "docs/doctor.md"


@dataclass
class Compared:
    """The result of a comparison.

    Attributes:
        requests: Number of different requests.
        same: Number of requests with equal responses every time.
        findings: The differences.
        latencies: Old and new latency of successful responses in seconds, without the first round.
        first_pieces: Seconds until the first piece, for responses that both servers stream.
        largest: Largest tolerated difference of numbers.
    """

    requests: int
    same: int = 0
    findings: list[Finding] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    first_pieces: list[tuple[float, float]] = field(default_factory=list)
    largest: float = 0.0


@dataclass
class _Seen:
    """The responses to one request."""

    first: Answer | None = None  # response of the old server
    unsteady: set[str] = field(default_factory=set)  # parts that differ in its later responses
    found: dict[str, Mismatch] = field(default_factory=dict)  # first ones between the servers


def compare_servers(
    old: Server, new: Server, requests: Sequence[Request], rules: Rules, rounds: int
) -> Compared:
    """Send all requests to both servers. The order alternates, because caches favour the second.

    Args:
        old: The reference.
        new: The server to check.
        requests: The requests.
        rules: The criteria of equality.
        rounds: How often all requests are sent; with several rounds, the first does not count for
            latencies.
    """
    compared = Compared(len(requests))
    seen = [_Seen() for _ in requests]
    silent = {old.url: 0, new.url: 0}  # consecutive requests without response
    for turn, (number, request) in product(range(rounds), enumerate(requests)):
        if (turn + number) % 2:
            second = new.ask(request)
            first = old.ask(request)
        else:
            first = old.ask(request)
            second = new.ask(request)
        _note(seen[number], first, second, rules, compared)
        if first.is_success and second.is_success and (turn or rounds == 1):
            compared.latencies.append((first.seconds, second.seconds))
            if first.is_streamed and second.is_streamed:
                compared.first_pieces.append((first.first, second.first))
        for server, answer in ((old, first), (new, second)):
            silent[server.url] = silent[server.url] + 1 if answer.problem else 0
        if gone := [url for url, count in silent.items() if count == _GIVEN_UP]:
            what = f"no answer {_GIVEN_UP} times in a row; the remaining requests were not sent"
            compared.findings.append(_finding("stopped", gone[0], what))
            break
    for request, each in zip(requests, seen, strict=True):
        compared.same += each.first is not None and not each.found
        compared.findings += _findings(str(request), each)
    return compared


def slower(latencies: Sequence[tuple[float, float]], max_ratio: float) -> Iterator[Finding]:
    """Yield a finding if the new server's median latency is too long."""
    if latencies and (ratio := Latencies(latencies).ratio.value) > max_ratio:
        what = f"the median latency is {ratio:.2f} times the old one; {max_ratio:g} are allowed"
        yield _finding("slower", "all requests", what)


def _note(seen: _Seen, old: Answer, new: Answer, rules: Rules, compared: Compared) -> None:
    found, largest = differences(old, new, rules)
    for each in found:
        seen.found.setdefault(each.about, each)
    if not any(each.rule == "body" for each in found):
        compared.largest = max(compared.largest, largest)
    if seen.first is None:
        seen.first = old
    else:
        seen.unsteady |= {each.about for each in differences(seen.first, old, rules)[0]}


def _findings(name: str, seen: _Seen) -> Iterator[Finding]:
    for each in seen.found.values():
        if each.about in seen.unsteady:
            what = f"responses of the old server also differ from each other: {each.what}"
            yield _finding("unsteady", name, what)
        else:
            yield _finding(each.rule, name, each.what)


def _finding(rule: str, place: str, what: str) -> Finding:
    return Finding(rule, RULES[rule][0], Place(place), what, _DO.get(rule, ""), PAGE)
