"""Counts outcomes, and collects those that are not allowed."""

import time
from collections import Counter, defaultdict

from chaos.rules import MATE_FAILED, MATES_SHARE, Outcome, judge
from chaos.served import Request
from chaos.timeline import Timeline

_KEPT = 20  # violations; after so many more of them say nothing new


class Referee:
    """Knows everything that happened.

    Attributes:
        timeline: The faults that were made.
        outcomes: Kind of request and what became of it, counted; by model.
        violations: What was not allowed, in sentences.
        journal: The actions with their times, in sentences.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.innocents: Counter[str] = Counter()
        self.violations: list[str] = []
        self.journal: list[str] = []
        self.slowest: defaultdict[str, float] = defaultdict(float)
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def count(self) -> int:
        """Requests that came to an end."""
        return sum(counts.total() for counts in self.outcomes.values())

    def note(self, text: str) -> None:
        """Write into the journal."""
        self.journal.append(f"{self.now:8.3f} {text}")

    def violation(self, text: str) -> None:
        """Something happened that must not."""
        if len(self.violations) < _KEPT:
            self.violations.append(f"{self.now:8.3f} {text}")
            self.note(f"VIOLATION {text}")

    def outcome(self, request: Request, outcome: Outcome, transport: str = "") -> None:
        """A request came to an end."""
        name = request.model.name
        verdict = judge(request, outcome, self.timeline)
        group, _, _ = f"{transport}{name}".partition("-")  # those that come and go have a number
        kind = f"{request.misdeed}: " if request.misdeed else ""
        self.outcomes[group][kind + verdict.label] += 1
        if not request.misdeed:
            self.innocents[verdict.label] += 1
        self.slowest[group] = max(self.slowest[group], outcome.until - outcome.since)
        if not verdict.is_allowed:
            what = f"{request.misdeed or 'innocent'} {transport}request {request.token} to {name}"
            self.violation(f"{what}: {outcome}; sent at {outcome.since - self._began:.3f}")

    def close(self) -> None:
        """Judge what only the whole run shows."""
        mates = self.innocents[MATE_FAILED]
        if mates > MATES_SHARE * self.innocents.total():
            self.violation(f"{mates} of {self.innocents.total()} innocents failed with their batch")
