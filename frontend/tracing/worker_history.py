"""The last changes of a model version's workers: their states, and their number."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import NamedTuple

READY = "ready"
_FAILED = "failed"
_STOPPED = "stopped"
_MAX_CHANGES = 500
_MAX_SCALINGS = 50


class WorkerChange(NamedTuple):
    """A worker's new state, and the error that led to it; ``at`` is on the monotonic clock."""

    at: float
    worker_id: int
    state: str
    error: str = ""


class Scaling(NamedTuple):
    """A change of the number of workers that the server made itself."""

    at: float
    workers: int
    why: str


class WorkerHistory:
    """The last changes of the workers of a model version."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changes: deque[WorkerChange] = deque()
        self.scalings: deque[Scaling] = deque(maxlen=_MAX_SCALINGS)
        #: The states of workers before the first change.
        self._before: dict[int, str] = {}

    def changed(self, worker_id: int, state: str, error: str = "") -> None:
        """Record the state of a worker; again with an error, once that is known."""
        for index in range(len(self._changes) - 1, -1, -1):
            last = self._changes[index]
            if last.worker_id == worker_id:
                if last.state == state:
                    self._changes[index] = last._replace(error=error)
                    return
                break
        self._changes.append(WorkerChange(self._clock(), worker_id, state, error))
        if len(self._changes) > _MAX_CHANGES:
            self._follow(self._changes.popleft(), self._before)

    def scaled(self, workers: int, why: str) -> None:
        """Record that the server changes the number of workers."""
        self.scalings.append(Scaling(self._clock(), workers, why))

    def changes(self) -> Iterable[WorkerChange]:
        """Return the changes of all workers, the newest last."""
        return self._changes

    def failures(self, seconds: float) -> int:
        """Return how often workers failed in the last seconds."""
        start = self._clock() - seconds
        recent = takewhile(lambda change: change.at >= start, reversed(self._changes))
        return sum(change.state == _FAILED for change in recent)

    def fewest_ready(self, start: float, end: float) -> tuple[int, Counter[str]]:
        """Return the fewest workers that were ready at once between two moments.

        The second item has the number of workers in each state at that moment.
        """
        states = dict(self._before)
        fewest: Counter[str] | None = None
        for change in self._changes:
            if change.at > end:
                break
            if change.at > start:
                fewest = _fewer_ready(fewest, states)
            self._follow(change, states)
        fewest = _fewer_ready(fewest, states)
        return fewest[READY], fewest

    @staticmethod
    def _follow(change: WorkerChange, states: dict[int, str]) -> None:
        if change.state == _STOPPED:
            states.pop(change.worker_id, None)
        else:
            states[change.worker_id] = change.state


def _fewer_ready(fewest: Counter[str] | None, states: dict[int, str]) -> Counter[str]:
    now = Counter(states.values())
    return now if fewest is None or now[READY] < fewest[READY] else fewest
