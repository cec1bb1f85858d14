"""From turns to ratios and tables; pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import report
from cases import ADAPTIVE, OURS, YARDSTICK, Case

_PAGE_HEADINGS = ("", "requests/s", "p50 ms", "p99 ms", "CPU µs")
_HEADINGS = ("", "requests/s", "p50 ms", "p99 ms", "CPU µs", "marserve is ahead by", "goal")


@dataclass(frozen=True)
class Turn:
    """One entry, one load, once.

    Attributes:
        rate: Answers per second.
        p50_ms: Median latency, milliseconds.
        p99_ms: 99th percentile of the latency.
        cpu_us: Processor time of all the server's processes per answer, microseconds. Neighbours
            on the machine change it least.
    """

    rate: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


NOT_PEERS = frozenset({OURS, ADAPTIVE, YARDSTICK})
Turns = Mapping[tuple[str, str], Sequence[Turn]]


@dataclass(frozen=True)
class Standing:
    """How one entry did in a case.

    Attributes:
        entry: Whose.
        turns: Round by round.
        ratios: By how much we were ahead in each round; above 1 is good for us. Empty for the
            entry that the others are held against.
        goal: The ratio that is wanted, None where none was set.
    """

    entry: str
    turns: Sequence[Turn]
    ratios: Sequence[float]
    goal: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the median keeps to the goal."""
        if self.goal is None or not self.ratios:
            return ""
        met = statistics.median(self.ratios) >= self.goal
        return f"≥ {self.goal:g}: {'met' if met else 'missed'}"

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as texts, one per heading."""
        return (
            self.entry,
            report.spread([one.rate for one in self.turns]),
            report.spread([one.p50_ms for one in self.turns]),
            report.spread([one.p99_ms for one in self.turns]),
            report.spread([one.cpu_us for one in self.turns]),
            report.spread(self.ratios) if self.ratios else "",
            self.verdict,
        )


def standings(case: Case, turns: Turns) -> list[Standing]:
    """Everybody who finished a case, we first, then the fastest first.

    A peer that dropped out half-way has fewer rounds than we have and is left out.
    """
    ours = turns.get((case.key, case.reference), ())
    found = [
        Standing(name, theirs, ratios(case, ours, theirs, name), (case.goals or {}).get(name))
        for (key, name), theirs in turns.items()
        if key == case.key and len(theirs) == len(ours)
    ]
    best = -1 if case.by_rate else 1
    return sorted(
        found, key=lambda one: (one.entry not in (OURS, ADAPTIVE), best * _score(case, one))
    )


def ratios(case: Case, ours: Sequence[Turn], theirs: Sequence[Turn], name: str) -> list[float]:
    """By how much we were ahead, round by round: in throughput, or in p99 at a given rate."""
    if name == case.reference:
        return []
    pairs = zip(ours, theirs, strict=True)
    if case.by_rate:
        return [mine.rate / other.rate for mine, other in pairs]
    return [other.p99_ms / mine.p99_ms for mine, other in pairs]


def _score(case: Case, one: Standing) -> float:
    return statistics.median(turn.rate if case.by_rate else turn.p99_ms for turn in one.turns)


def console(cases: Sequence[Case], turns: Turns) -> str:
    """All tables in columns."""
    return "\n\n".join(_in_columns(case, turns) for case in cases if standings(case, turns))


def markdown(cases: Sequence[Case], turns: Turns) -> str:
    """One table for a page: a row for each case, with our figures and the ratios to the others."""
    found = [(case, entries) for case in cases if (entries := standings(case, turns))]
    names = dict.fromkeys(one.entry for _, entries in found for one in entries if one.ratios)
    headings = (*_PAGE_HEADINGS, *names)
    rows = [headings, ("---",) * len(headings)] if found else []
    for case, entries in found:
        ours = next(one for one in entries if one.entry == case.reference)
        ratio = {one.entry: report.spread(one.ratios) for one in entries if one.ratios}
        label = case.title if case.reference == OURS else f"{case.title} ({case.reference})"
        rows.append((label, *ours.cells[1:5], *(ratio.get(name, "") for name in names)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def ahead_of_us(cases: Sequence[Case], turns: Turns) -> list[str]:
    """Where a peer is faster, in words: "mosec 1.5 times in …", the yardstick not counted."""
    return [
        f"{one.entry} {1 / statistics.median(one.ratios):.3g} times in “{case.title}”"
        for case in cases
        for one in standings(case, turns)
        if one.entry not in NOT_PEERS and one.ratios and statistics.median(one.ratios) < 1
    ]


def _in_columns(case: Case, turns: Turns) -> str:
    rows = [_HEADINGS, *(one.cells for one in standings(case, turns))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join([case.title, *lines])
