"""The failed steps of a catalog, which are repeated after growing pauses."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from marserve.frontend.catalog.plan import EntryStep, Step
from marserve.frontend.logs.formats import one_line

_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0)  # seconds


@dataclass(frozen=True)
class FailedStep:
    """A step for one version of a model that failed."""

    name: str
    version: str
    url: str
    error: Exception
    attempts: int
    retry_at: float  # of the clock

    @property
    def reason(self) -> str:
        """The error, as a sentence."""
        return one_line(self.error) or type(self.error).__name__

    def described(self, now: float) -> dict[str, Any]:
        """Return a description for operators; ``now`` is a moment of the clock."""
        return {
            "modelName": self.name,
            "modelVersion": self.version,
            "modelUrl": one_line(self.url),
            "reason": self.reason,
            "attempts": self.attempts,
            "nextAttemptSeconds": round(max(0.0, self.retry_at - now), 1),
        }


class FailedSteps(dict[str, dict[str, FailedStep]]):
    """The failed steps by model name and version."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def note(self, name: str, step: Step, error: Exception) -> float:
        """Record a failed step; return the seconds until it is repeated."""
        failures = self.setdefault(name, {})
        earlier = failures.get(step.version)
        attempts = earlier.attempts + 1 if earlier else 1
        pause = _PAUSES[min(attempts, len(_PAUSES)) - 1]
        url = step.entry.url if isinstance(step, EntryStep) else ""
        failures[step.version] = FailedStep(
            name, step.version, url, error.with_traceback(None), attempts, self._clock() + pause
        )
        return pause

    def forget(self, name: str, keep: Collection[str] = ()) -> None:
        """Remove the failures of a model, except those of the versions in ``keep``."""
        failures = self.pop(name, {})
        if kept := {version: each for version, each in failures.items() if version in keep}:
            self[name] = kept

    def of(self, name: str) -> list[FailedStep]:
        """Return the failures of a model."""
        return [*self.get(name, {}).values()]
