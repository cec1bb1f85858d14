"""What the doctor has found: findings, by level, each perhaps with the change that mends it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Level(Enum):
    """How much a finding weighs, the heaviest first."""

    BLOCKS = "blocks"  # cannot work on marserve
    CHANGE = "change"  # names TorchServe's own software: what moving consists of
    CHECK = "check"  # cannot be decided from the files
    DIFFERS = "differs"  # works, otherwise
    GAINS = "gains"  # marserve can do better
    WORKS = "works"  # unchanged

    @property
    def weight(self) -> int:
        """The position among the levels."""
        return [*Level].index(self)


@dataclass(frozen=True, order=True)
class Place:
    """Where something was found: a file and perhaps a line, or a server's model."""

    name: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line else self.name


@dataclass(frozen=True)
class Fix:
    """A change of one line of a file; ``after`` is None for a line that goes."""

    path: Path
    line: int
    before: str
    after: str | None


@dataclass(frozen=True)
class Finding:
    """One thing: what it is, what to do about it, and where to read more."""

    rule: str  # of `rules.RULES`
    level: Level
    place: Place
    what: str
    do: str = ""
    link: str = ""
    fixes: tuple[Fix, ...] = ()


@dataclass
class Report:
    """All findings of a run.

    Attributes:
        read: What was read: files, archives, models of a server.
        findings: In the order in which they were found.
        ignored: How many were left out because of ``--ignore``.
    """

    read: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    ignored: int = 0

    def at(self, *levels: Level) -> Sequence[Finding]:
        """The findings of some levels: the heaviest first, then by place."""
        found = [each for each in self.findings if each.level in levels]
        return sorted(found, key=lambda each: (each.level.weight, each.place))
