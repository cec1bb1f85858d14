"""The findings as text and as JSON."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from marserve.frontend.version import __version__
from marserve.tools.doctor.findings import Finding, Level, Report

#: Incremented when a member is removed or changes its meaning; members may be added at any time.
SCHEMA = 1
_HEADINGS = {
    Level.BLOCKS: "Cannot work",
    Level.CHANGE: "To change for the move",
    Level.CHECK: "To check",
    Level.DIFFERS: "Will differ",
    Level.GAINS: "To gain",
    Level.WORKS: "Works unchanged",
}
_PLACES = 3
_STRICT = (Level.BLOCKS, Level.CHANGE, Level.CHECK, Level.DIFFERS)


def exit_status(report: Report, *, strict: bool = False) -> int:
    """Return 1 if a finding blocks; with ``strict`` also if one differs."""
    return int(bool(report.at(*(_STRICT if strict else (Level.BLOCKS,)))))


def as_text(report: Report, *, verbose: bool = False) -> Iterator[str]:
    """Return the lines of the text report."""
    for level in Level:
        found = report.at(level)
        if not found:
            continue
        if level is Level.WORKS and not verbose:
            names = ", ".join(each.what for each in found[:_PLACES])
            more = len(found) - _PLACES
            yield f"{_HEADINGS[level]}: {names}{f' and {more} more' if more > 0 else ''}"
            continue
        groups = _grouped(found)
        yield f"{_HEADINGS[level]} ({len(groups)})"
        for group in groups:
            yield from _lines(group, verbose=verbose)
        yield ""
    yield _summary(report)


def as_json(report: Report, status: int) -> str:
    """Return the document of ``--json``; docs/doctor.md describes its members."""
    document = {
        "schema": SCHEMA,
        "marserve": __version__,
        "status": status,
        "read": report.read,
        "counts": {level.value: len(report.at(level)) for level in Level},
        "ignored": report.ignored,
        "findings": [_member(each) for each in report.at(*Level)],
    }
    return json.dumps(document, indent=2)


def _member(found: Finding) -> dict[str, Any]:
    return {
        "rule": found.rule,
        "level": found.level.value,
        "file": found.place.name,
        "line": found.place.line or None,
        "what": found.what,
        "do": found.do,
        "link": found.link,
        "fixable": bool(found.fixes),
    }


def _grouped(found: Sequence[Finding]) -> list[list[Finding]]:
    def key(each: Finding) -> tuple[str, str, str]:
        return (each.rule, each.what, each.do)

    first = {key(each): at for at, each in reversed([*enumerate(found)])}
    ordered = sorted(found, key=lambda each: first[key(each)])
    return [[*group] for _, group in groupby(ordered, key)]


def _lines(group: Sequence[Finding], *, verbose: bool) -> Iterator[str]:
    one = group[0]
    shown = group if verbose else group[:_PLACES]
    places = ", ".join(dict.fromkeys(str(each.place) for each in shown))
    more = len(group) - len(shown)
    yield f"  {places}{f' and {more} more' if more else ''}: {one.what} [{one.rule}]"
    if one.do:
        yield f"    -> {one.do}"
    if one.link:
        yield f"       {one.link}"


def _summary(report: Report) -> str:
    counts = {level: len(_grouped(report.at(level))) for level in Level}
    parts = [
        f"{counts[level]} {word}"
        for level, word in (
            (Level.BLOCKS, "cannot work"),
            (Level.CHANGE, "to change"),
            (Level.CHECK, "to check"),
            (Level.DIFFERS, "differ"),
            (Level.GAINS, "to gain"),
        )
        if counts[level]
    ]
    files = len(report.read)
    fixable = sum(bool(each.fixes) for each in report.findings)
    ending = f"; --write fixes {fixable}" if fixable else ""
    ignored = f" ({report.ignored} ignored)" if report.ignored else ""
    read = f"{files} {'source' if files == 1 else 'sources'} read"
    return f"{read}: {', '.join(parts) or 'nothing to change'}{ignored}{ending}."
