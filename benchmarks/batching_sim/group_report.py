"""Tables of the groups, their goals, and what they were before the latest changes (`Baseline`)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from contenders import ADAPTIVE, COLD, LATE_GOAL, TAKE_ALL
from grid import OPTIMUM, Result
from report import Goal, print_table

_BOUND = "bound"
_OURS = (ADAPTIVE.name, COLD.name, LATE_GOAL.name)
# A group may be so many points worse than in the baseline, and decisions this much slower: their
# speed is measured, and never twice the same.
_WORSE_POINTS = 0.5
_SLOWER = 0.9


@dataclass(frozen=True)
class Baseline:
    """What the adaptive policy reached at some time, to see what has become worse.

    Attributes:
        command: What has measured it.
        goodput: Mean of each group in percent, by seeds, groups and starts.
        decisions: See `scenarios.speed_of_decisions`.
    """

    command: str
    goodput: Mapping[str, Mapping[str, Mapping[str, float]]]
    decisions: Sequence[float]

    @classmethod
    def of(
        cls,
        command: str,
        results: Mapping[str, Mapping[str, Sequence[Result]]],
        decisions: Sequence[float],
    ) -> "Baseline":
        """What was measured now, by seeds and groups."""
        goodput = {
            seeds: {
                group: {name: round(_goodput(some, name), 3) for name in _ours(some)}
                for group, some in groups.items()
            }
            for seeds, groups in results.items()
        }
        return cls(command, goodput, [round(rate, 4) for rate in decisions])

    @classmethod
    def read(cls, file: Path) -> "Baseline":
        """Read what `write` has written."""
        return cls(**json.loads(file.read_text()))

    def write(self, file: Path) -> None:
        """Write it as JSON."""
        file.write_text(json.dumps(asdict(self), indent=2) + "\n")


def group_goals(
    results: Mapping[str, Sequence[Result]],
    seeds: str,
    baseline: Baseline,
    decisions: Sequence[float],
) -> list[Goal]:
    """What was promised of the groups that were run with these seeds."""
    found = _goals_of_tails(results.get("heavy", ()))
    for group in ("cliff", "convex"):
        found += _goals_of_cold_starts(group, results.get(group, ()))
    if first := results.get("first"):
        mean = float(np.mean([100 * one.regret(COLD.name) for one in first]))
        found.append(Goal("first 300 requests, cold, below the optimum, mean, points", mean, 3))
    for group, some in results.items():
        found += [
            Goal(
                f"{group}: {name}, goodput %, against the baseline",
                _goodput(some, name),
                baseline.goodput[seeds][group][name] - _WORSE_POINTS,
                at_least=True,
            )
            for name in _ours(some)
        ]
    kinds = ("what leaves", "who is let in")
    return found + [
        Goal(f"speed of decisions, {kind} / baseline", now / before, _SLOWER, at_least=True)
        for kind, now, before in zip(kinds, decisions, baseline.decisions, strict=True)
    ]


def _goals_of_tails(results: Sequence[Result]) -> list[Goal]:
    if not results:
        return []
    found = []
    for name in (ADAPTIVE.name, COLD.name):
        below_best = max(100 * one.regret(name) for one in results)
        below_greedy = max(
            100 * (one.figures[TAKE_ALL.name].goodput - one.figures[name].goodput)
            for one in results
        )
        found += [
            Goal(f"heavy: {name}, below the best policy, worst case, points", below_best, 5),
            Goal(f"heavy: {name}, below greedy, worst case, points", below_greedy, 2),
        ]
    return found


def _goals_of_cold_starts(group: str, results: Sequence[Result]) -> list[Goal]:
    if not results:
        return []
    shares = [
        100 * one.figures[COLD.name].settled / one.figures[ADAPTIVE.name].settled for one in results
    ]
    name = f"{group}: cold after 3,000 requests, % of warm, worst case"
    return [Goal(name, min(shares), 90, at_least=True)]


def _goodput(results: Sequence[Result], name: str) -> float:
    return float(np.mean([100 * one.figures[name].goodput for one in results]))


def _ours(results: Sequence[Result]) -> list[str]:
    return [name for name in _OURS if name in results[0].figures]


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
