"""The findings of the doctor, with their levels and fixes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Level(Enum):
    """The severity of a finding, the highest first."""

    BLOCKS = "blocks"  # cannot work on marserve
    CHANGE = "change"  # names TorchServe's software, to be replaced
    CHECK = "check"  # cannot be decided from the files
    DIFFERS = "differs"  # works differently
    GAINS = "gains"  # marserve can do better
    WORKS = "works"  # unchanged

    @property
    def weight(self) -> int:
        """The position among the levels, 0 for the most severe."""
        return [*Level].index(self)


@dataclass(frozen=True, order=True)
class Place:
    """The place of a finding: a file with an optional line, or a model of a server."""

    name: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line else self.name


@dataclass(frozen=True)
class Fix:
    """A change of one line of a file; ``after`` is None for a removed line."""

    path: Path
    line: int
    before: str
    after: str | None


@dataclass(frozen=True)
class Finding:
    """A finding: what it is, what to do, and a link to the documentation."""

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
        read: Names of the sources: files, archives, models of a server.
        findings: In the order of the examination.
        ignored: Number of findings omitted by ``--ignore``.
    """

    read: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    ignored: int = 0

    def at(self, *levels: Level) -> Sequence[Finding]:
        """Return the findings of the given levels, the most severe first, then by place."""
        found = [each for each in self.findings if each.level in levels]
        return sorted(found, key=lambda each: (each.level.weight, each.place))
