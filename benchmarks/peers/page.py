"""The generated part of docs/performance.md; what stands outside its markers is written by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import results
from cases import Case
from contract import Peer

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
_PICTURE = "images/peers.png"
_NOBODY = "In this run nobody was ahead of marserve."


class PageUnfit(Exception):
    """The page cannot take the generated part; why."""


@dataclass(frozen=True)
class Told:
    """What a reader must know to judge the numbers.

    Attributes:
        machine: It, and how the numbers came about.
        load: The load generator.
        command: What to type to repeat it.
        versions: Of each peer that took part.
        left_out: One line for each that did not, or not everywhere.
    """

    machine: str
    load: str
    command: str
    versions: Mapping[Peer, str]
    left_out: Sequence[str]


def picture(page: Path) -> Path:
    """Where the plot of a page lies."""
    return page.parent / _PICTURE


def generate(cases: Sequence[Case], turns: results.Turns, told: Told) -> str:
    """The generated part, without its markers."""
    peers = [
        f"| {peer.name} | {version} | {peer.note} |" for peer, version in told.versions.items()
    ]
    ahead = results.ahead_of_us(cases, turns)
    pieces = [
        f"```bash\n{told.command}\n```",
        told.machine.replace("\n", "  \n") + f"  \nLoad: {told.load}.",
        "\n".join(["| | version | |", "|---|---|---|", *peers]),
        f"![By how much marserve is ahead of each peer in each case]({_PICTURE})",
        f"Ahead of marserve: {'; '.join(ahead)}." if ahead else _NOBODY,
        *(f"Left out: {line}" for line in told.left_out),
        results.markdown(cases, turns),
    ]
    return "\n\n".join(pieces)


def renew(page: str, generated: str) -> str:
    """The page with its generated part replaced.

    Raises:
        PageUnfit: The markers are not there, once each and in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or page.count(BEGIN) > 1 or page.count(END) > 1:
        raise PageUnfit(f"needs one line {BEGIN} and below it one line {END}")
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}"
