"""What was measured, and the table that tells it: medians, spreads, ratios, goals."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from marserve.tools.bench.machine import machine as facts_of_machine

_HEADINGS = ("measured", "marserve", "against", "", "ratio", "goal", "")
# Two threads of torch that wait for each other on two cores are ruined by a single guest.
_BUSY_PERCENT = 10.0


@dataclass(frozen=True)
class Row:
    """Repetitions of one measurement, beside what they are held against.

    Attributes:
        name: What was measured, with its unit.
        ours: One value per repetition.
        against: What the others are.
        theirs: One value per repetition, taken in turn with ours; a single one is a fixed limit.
        at_least: The ratio ours / theirs that is wanted, None where none was set.
        at_most: The same from above.
    """

    name: str
    ours: Sequence[float]
    against: str
    theirs: Sequence[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def ratios(self) -> list[float]:
        """Ours by theirs, repetition by repetition."""
        fixed = len(self.theirs) == 1
        theirs = list(self.theirs) * len(self.ours) if fixed else self.theirs
        return [ours / other for ours, other in zip(self.ours, theirs, strict=True)]

    @property
    def goal(self) -> str:
        """The goal in words, empty when there is none."""
        if self.at_least is not None:
            return f">= {self.at_least:.2f}"
        return f"<= {self.at_most:.2f}" if self.at_most is not None else ""

    @property
    def verdict(self) -> str:
        """Whether the median keeps to the goal."""
        ratio = statistics.median(self.ratios)
        if self.at_least is not None:
            return "met" if ratio >= self.at_least else "MISSED"
        if self.at_most is not None:
            return "met" if ratio <= self.at_most else "MISSED"
        return ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as texts, one per heading."""
        return (
            self.name,
            spread(self.ours),
            self.against,
            spread(self.theirs),
            spread(self.ratios),
            self.goal,
            self.verdict,
        )


def spread(values: Sequence[float]) -> str:
    """Median and, of several values, the smallest and the largest: ``1.20 (1.10-1.30)``."""
    median = _number(statistics.median(values))
    if len(values) == 1:
        return median
    return f"{median} ({_number(min(values))}-{_number(max(values))})"


def table(rows: Sequence[Row]) -> str:
    """The rows under their headings, in columns."""
    lines = [_HEADINGS, *(row.cells for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def machine(busy: float) -> str:
    """What the numbers were taken on: without it they mean nothing.

    Args:
        busy: Percent of the processors' time that others took before a piece began, at worst.
    """
    libraries = ", ".join(f"{name} {version(name)}" for name in ("aiohttp", "uvloop", "torch"))
    warning = "\nThe machine was busy: take these numbers again." if busy > _BUSY_PERCENT else ""
    facts = facts_of_machine()
    return (
        f"{facts['processor']}, {facts['cores']} cores ({busy:.0f} % busy before), "
        f"Python {facts['python']}, {libraries}\n"
        f"Median (smallest-largest) over repetitions that took turns.{warning}"
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
