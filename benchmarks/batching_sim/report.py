"""The tables, and the goals beside what came out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from contenders import ADAPTIVE, TAKE_ALL, TORCHSERVE
from grid import OPTIMUM, Figures, Result
from scenarios import Story

# A load up to which workers have time to spare, and one beyond what they can do.
_LIGHT, _BEYOND = 0.8, 1.0
_BANDS = (("0.1-0.5", 0.0, 0.5), ("0.8-0.95", 0.8, 0.95), ("beyond 1", 1.0, 9.0))


@dataclass(frozen=True)
class Goal:
    """What was wanted of a figure.

    Attributes:
        name: The figure, with its unit.
        value: What it is.
        limit: What it may be at most, or must be at least.
        at_least: Which of the two.
        digits: After the point.
    """

    name: str
    value: float
    limit: float
    at_least: bool = False
    digits: int = 2

    @property
    def is_met(self) -> bool:
        """Whether it is."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as texts."""
        sign = ">=" if self.at_least else "<="
        value, limit = (f"{one:,.{self.digits}f}" for one in (self.value, self.limit))
        return self.name, value, f"{sign} {limit}", "met" if self.is_met else "MISSED"


def goals(
    single: Sequence[Result],
    several: Sequence[Result],
    noisy: Sequence[Result],
    noisy_several: Sequence[Result],
    decisions: tuple[float, float],
) -> list[Goal]:
    """Everything that was promised, from the grids and the speed of decisions."""
    name = ADAPTIVE.name
    regrets = [100 * one.regret(name) for one in single]
    late = [100 * one.figures[name].late for one in noisy]
    late_several = [100 * one.figures[name].late for one in noisy_several]
    plans, admissions = decisions
    return [
        Goal("goodput below the optimum, mean of the grid, points", float(np.mean(regrets)), 1),
        Goal("goodput below the optimum, worst of the grid, points", max(regrets), 3),
        Goal("late answers with noise, 1 worker, mean of the grid, %", float(np.mean(late)), 1),
        Goal("late answers with noise, 1 worker, worst of the grid, %", max(late), 1),
        Goal("late answers with noise, 4 workers, mean, %", float(np.mean(late_several)), 1),
        Goal("mean latency / take-all, load <= 0.8, 1 worker, worst", max(slowness(single)), 1.02),
        Goal(
            "mean latency / take-all, load <= 0.8, 4 workers, worst", max(slowness(several)), 1.02
        ),
        Goal("goodput / TorchServe's at load 1.2", _against_torchserve(single), 2, at_least=True),
        Goal("decisions per second: what leaves", plans, 100_000, at_least=True, digits=0),
        Goal("decisions per second: who is let in", admissions, 100_000, at_least=True, digits=0),
    ]


def slowness(results: Iterable[Result]) -> list[float]:
    """Mean latency of the adaptive policy by that of take-all, for each case of light load."""
    return [
        one.figures[ADAPTIVE.name].latency / one.figures[TAKE_ALL.name].latency
        for one in results
        if one.case.load <= _LIGHT
    ]


def _against_torchserve(results: Iterable[Result]) -> float:
    beyond = [one.figures for one in results if one.case.load > _BEYOND]
    ours, theirs = (
        np.mean([one[name].goodput for one in beyond]) for name in (ADAPTIVE.name, TORCHSERVE.name)
    )
    return float(ours / theirs)


def print_goals(some: Sequence[Goal]) -> None:
    """What was wanted beside what is."""
    print_table("Goals", ("", "is", "goal", ""), [one.cells for one in some])


def print_grid(title: str, results: Sequence[Result]) -> None:
    """Goodput by load, and what else tells the contenders apart."""
    headings = ("policy", *(f"load {band}" for band, _, _ in _BANDS))
    further = ("regret", "late", "refused", "mean ms", "p50 ms", "p99 ms", "batch", "lat./take-all")
    names = list(results[0].figures)
    rows = [
        (
            name,
            *(_goodput(name, results, low, high) for _, low, high in _BANDS),
            *_further(name, results),
        )
        for name in names
    ]
    print_table(title, (*headings, *further), rows)


def _goodput(name: str, results: Iterable[Result], low: float, high: float) -> str:
    shares = [100 * one.figures[name].goodput for one in results if low <= one.case.load <= high]
    return f"{np.mean(shares):.1f} ({min(shares):.0f})" if shares else ""


def _further(name: str, results: Sequence[Result]) -> tuple[str, ...]:
    if name == OPTIMUM:
        return ("0",) + ("",) * 7

    def mean(of: Callable[[Figures], float], factor: float, digits: int = 1) -> str:
        values = [factor * of(one.figures[name]) for one in results]
        return f"{np.nanmean(values):.{digits}f}"

    has_optimum = OPTIMUM in results[0].figures
    regret = np.mean([100 * one.regret(name) for one in results]) if has_optimum else np.nan
    light = [one.figures for one in results if one.case.load <= _LIGHT]
    ratio = ""
    if TAKE_ALL.name in light[0]:
        ratios = [one[name].latency / one[TAKE_ALL.name].latency for one in light]
        ratio = f"{np.mean(ratios):.2f}"
    return (
        f"{regret:.2f}" if has_optimum else "",
        mean(lambda one: one.late, 100),
        mean(lambda one: one.turned_away, 100),
        mean(lambda one: one.good_mean, 1000),
        mean(lambda one: one.good_median, 1000),
        mean(lambda one: one.good_p99, 1000),
        mean(lambda one: one.batch_size, 1),
        ratio,
    )


def print_worst(results: Sequence[Result], count: int) -> None:
    """Where the adaptive policy is farthest from the optimum."""
    name = ADAPTIVE.name
    worst = sorted(results, key=lambda one: -one.regret(name))[:count]
    rows = [
        (
            f"{one.case.profile}, {one.case.arrivals}, load {one.case.load}",
            f"{100 * one.figures[OPTIMUM].goodput:.2f}",
            f"{100 * one.figures[name].goodput:.2f}",
            f"{100 * one.regret(name):.2f}",
        )
        for one in worst
    ]
    print_table("Farthest from the optimum", ("case", OPTIMUM, name, "regret"), rows)


def print_stories(title: str, stories: Sequence[Story]) -> None:
    """What became of a change."""
    rows = [
        (
            one.name,
            f"{100 * one.outcome.goodput:.1f}",
            f"{100 * one.outcome.late:.1f}",
            f"{100 * one.outcome.turned_away:.1f}",
            f"{one.recovery * 1000:.0f}" if np.isfinite(one.recovery) else "never",
        )
        for one in stories
    ]
    headings = ("policy", "goodput %", "late %", "refused %", "well again after ms")
    print_table(title, headings, rows)


def print_closed_loops(stories: dict[int, Sequence[Story]]) -> None:
    """Throughput and latency of clients that wait for their answers."""
    names = [one.name for one in next(iter(stories.values()))]
    rows = [(str(clients), *(_loop_cell(one) for one in some)) for clients, some in stories.items()]
    title = "Closed loop on the GPU: answers per second, mean latency, mean batch"
    print_table(title, ("clients", *names), rows)


def _loop_cell(story: Story) -> str:
    outcome = story.outcome
    answered = np.isfinite(outcome.latency)
    rate = answered.sum() / (outcome.arrived + outcome.latency)[answered].max()
    return f"{rate:.0f}/s {1000 * outcome.mean_latency:.1f} ms {outcome.batch_size:.1f}"


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they must be; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    print(f"\n{title}\n")
    for row in (headings, ["-" * width for width in widths], *rows):
        first, *others = zip(row, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]))
