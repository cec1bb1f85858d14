"""Tables of the groups."""

from collections.abc import Sequence

import numpy as np
from grid import OPTIMUM, Result
from report import print_table

_BOUND = "bound"


def print_group(title: str, results: Sequence[Result]) -> None:
    """How far everybody is below the bound; where costs are random, below the best of all."""
    rows = []
    for name in contenders(results):
        regrets = [100 * one.regret(name) for one in results if name in one.figures]
        figures = [one.figures[name] for one in results if name in one.figures]
        rows.append(
            (
                name,
                f"{np.mean(regrets):.2f}",
                f"{max(regrets):.2f}",
                f"{100 * np.mean([one.goodput for one in figures]):.1f}",
                f"{100 * np.mean([one.late for one in figures]):.1f}",
                f"{100 * np.mean([one.turned_away for one in figures]):.1f}",
            )
        )
    headings = ("points below the bound", "mean", "worst", "goodput %", "late %", "refused %")
    print_table(f"{title}, {len(results)} cases", headings, rows)


def print_cases(title: str, results: Sequence[Result]) -> None:
    """Goodput of everybody in each case, in percent."""
    names = contenders(results)
    rows = [
        (
            one.case.name,
            *(_percent(one, name) for name in (OPTIMUM, *names)),
            f"{100 * one.regret(names[-1]):.1f}",
        )
        for one in results
    ]
    print_table(f"{title}: goodput %", ("case", _BOUND, *names, f"{names[-1]}: below"), rows)


def contenders(results: Sequence[Result]) -> list[str]:
    """Everybody but the bound, in the order of their first appearance."""
    return [
        name for name in dict.fromkeys(n for one in results for n in one.figures) if name != OPTIMUM
    ]


def _percent(result: Result, name: str) -> str:
    return f"{100 * result.figures[name].goodput:.1f}" if name in result.figures else ""
