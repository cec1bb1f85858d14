"""What a catalog wants and could not be brought about: it is tried again less and less often."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from marserve.frontend.catalog.plan import SetDefault, Step, Unregister
from marserve.frontend.logs.formats import one_line

_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0)  # seconds


@dataclass(frozen=True)
class Failure:
    """One version of a model that is not as it is wanted."""

    name: str
    version: str
    url: str
    error: Exception
    attempts: int
    retry_at: float  # of the clock

    @property
    def reason(self) -> str:
        """Why, in a sentence."""
        return one_line(self.error) or type(self.error).__name__

    def described(self, now: float) -> dict[str, Any]:
        """The same, for operators."""
        return {
            "modelName": self.name,
            "modelVersion": self.version,
            "modelUrl": one_line(self.url),
            "reason": self.reason,
            "attempts": self.attempts,
            "nextAttemptSeconds": round(max(0.0, self.retry_at - now), 1),
        }


class Failures(dict[str, dict[str, Failure]]):
    """By name and version, until it succeeds or is no longer wanted; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def note(self, name: str, step: Step, error: Exception) -> float:
        """Note that a step failed; returns the seconds until it is tried again."""
        failures = self.setdefault(name, {})
        earlier = failures.get(step.version)
        attempts = earlier.attempts + 1 if earlier else 1
        pause = _PAUSES[min(attempts, len(_PAUSES)) - 1]
        url = "" if isinstance(step, SetDefault | Unregister) else step.entry.url
        failures[step.version] = Failure(
            name, step.version, url, error, attempts, self._clock() + pause
        )
        return pause

    def forget(self, name: str, but: Collection[str] = ()) -> None:
        """Forget those of a model, but of some versions."""
        failures = self.pop(name, {})
        if kept := {version: each for version, each in failures.items() if version in but}:
            self[name] = kept

    def of(self, name: str) -> list[Failure]:
        """Return those of a model."""
        return [*self.get(name, {}).values()]
