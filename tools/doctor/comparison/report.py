"""The result of a comparison as text and as JSON."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from marserve.tools.doctor.comparison.exchange import Request
from marserve.tools.doctor.comparison.latency import Latencies
from marserve.tools.doctor.comparison.pairs import Compared
from marserve.tools.doctor.findings import Finding, Level, Report
from marserve.tools.doctor.report import as_json

_HEADINGS = {
    Level.BLOCKS: "Not the same",
    Level.CHECK: "To check",
    Level.DIFFERS: "Differs, and seldom matters",
}
_SHOWN = 10


def comparison_json(report: Report, compared: Compared, urls: tuple[str, str], status: int) -> str:
    """Return the document of `marserve.tools.doctor.report` with the member ``comparison``."""
    document = json.loads(as_json(report, status))
    document["comparison"] = {
        "old": urls[0],
        "new": urls[1],
        "requests": compared.requests,
        "same": compared.same,
        "largest_difference": compared.largest,
        "latency_ms": _measured(compared.latencies),
        "first_piece_ms": _measured(compared.first_pieces),
    }
    return json.dumps(document, indent=2)


def _measured(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    if not pairs:
        return None
    found = Latencies(pairs)
    sides = dict(zip(("old", "new"), found.medians, strict=True))
    p99 = dict(zip(("old", "new"), found.p99 or (None, None), strict=True))
    return {
        "pairs": len(pairs),
        "median": {name: _ms(value) for name, value in sides.items()},
        "p99": {name: None if value is None else _ms(value) for name, value in p99.items()},
        "ratio": round(found.ratio.value, 4),
        "ratio_spread": found.ratio.spread and [round(each, 4) for each in found.ratio.spread],
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def as_text(report: Report, compared: Compared, *, verbose: bool) -> Iterator[str]:
    """Return the lines of the text report."""
    for level, heading in _HEADINGS.items():
        if found := report.at(level):
            yield f"{heading} ({len(found)})"
            yield from _lines(found, verbose=verbose)
            yield ""
    if compared.latencies:
        yield from _table("Latency", compared.latencies)
    if compared.first_pieces:
        yield from _table("Until the first piece", compared.first_pieces)
    numbers = f"; numbers differ by {compared.largest:.2g} at most" if compared.largest else ""
    ignored = f" ({report.ignored} ignored)" if report.ignored else ""
    yield (
        f"{compared.same} of {compared.requests} requests have the same answer from both"
        f"{numbers}{ignored}."
    )


def named(requests: Sequence[Request], *, verbose: bool) -> str:
    """Return the methods and targets of requests, each once; the first ones without ``verbose``."""
    names = list(dict.fromkeys(f"{each.method} {each.target}" for each in requests))
    shown = names if verbose else names[:_SHOWN]
    more = f" and {len(names) - len(shown)} more (--verbose)" if len(names) > len(shown) else ""
    return f"{', '.join(shown)}{more}"


def _lines(found: Sequence[Finding], *, verbose: bool) -> Iterator[str]:
    def text(each: Finding) -> tuple[str, str]:
        return each.what, each.do

    groups = [[*group] for _, group in groupby(sorted(found, key=text), text)]
    groups.sort(key=lambda group: -len(group))
    for group in groups if verbose else groups[:_SHOWN]:
        shown = group if verbose else group[:1]
        places = ", ".join(each.place.name for each in shown)
        more = f" and {len(group) - len(shown)} more" if len(group) > len(shown) else ""
        yield f"  {places}{more}: {group[0].what} [{group[0].rule}]"
        if group[0].do:
            yield f"    -> {group[0].do}"
    if len(groups) > _SHOWN and not verbose:
        yield f"  and {len(groups) - _SHOWN} more: --verbose"


def _table(heading: str, pairs: Sequence[tuple[float, float]]) -> Iterator[str]:
    found = Latencies(pairs)
    ratio = found.ratio
    spread = f" ({ratio.spread[0]:.2f} to {ratio.spread[1]:.2f})" if ratio.spread else ""
    p99 = found.p99
    yield f"{heading}, {len(pairs)} pairs"
    for name, index in (("old", 0), ("new", 1)):
        slow = f", p99 {p99[index] * 1000:.1f} ms" if p99 else ""
        yield f"  {name}: median {found.medians[index] * 1000:.1f} ms{slow}"
    yield f"  new/old: {ratio.value:.2f}{spread} times the median"
    yield ""
