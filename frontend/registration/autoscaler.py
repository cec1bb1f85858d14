"""Changes of the number of workers by load, for models with ``autoscale``.

A timer adds one worker when the first request in the queue has waited too long while all workers
are busy, and removes one when a worker was idle at every step for long enough. It never removes the
last one: a model without workers refuses its requests, so that no load would start one again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from marserve.frontend.aio.background import BackgroundTasks
from marserve.frontend.configuration.model_schema import Autoscaling
from marserve.frontend.errors import ServeError
from marserve.frontend.serving.model_version import ModelVersion

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 0.5
# After a worker that failed to start, mostly because memory was short.
_FIRST_PAUSE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 3600.0


@dataclass(frozen=True)
class Demand:
    """The load of a model."""

    workers: int  # that serve or may serve later
    ready: int  # of these, that can accept requests
    busy: int  # of these, that are processing requests
    waited: float  # seconds of the first request in the queue; 0 for an empty queue
    # Requests refused by a latency goal since the model was made. Then no request waits for long.
    refused: int = 0


class ScalingDecision:
    """Decides whether a model needs one more or one fewer worker."""

    def __init__(self, rule: Autoscaling) -> None:
        self._rule = rule
        self._spare_since: float | None = None
        self._refused = 0
        self._refuses_since: float | None = None
        self._resume = 0.0
        self._pause = _FIRST_PAUSE_SECONDS

    def step(self, now: float, demand: Demand, low: int, high: int) -> int:
        """Return the change of the number of workers, 1, -1 or 0, within ``low`` and ``high``."""
        is_refusing = self._is_refusing(now, demand.refused)
        if demand.ready < demand.workers:  # one is starting: wait for its effect
            return 0
        if is_refusing:
            self._spare_since = self._refuses_since = None
            return int(demand.workers < high and now >= self._resume)
        if demand.busy < demand.workers:
            return self._spare(now, demand.workers > max(1, low))
        self._spare_since = None
        is_late = demand.waited > self._rule.grow_after
        return int(is_late and demand.workers < high and now >= self._resume)

    def failed(self, now: float) -> None:
        """Record that a worker failed to start."""
        self._resume = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def succeeded(self) -> None:
        """Record that a worker has started or ended."""
        self._pause = _FIRST_PAUSE_SECONDS

    def _is_refusing(self, now: float, refused: int) -> bool:
        """Return whether requests were refused at every step for as long as one may wait."""
        if refused == self._refused:
            self._refuses_since = None
            return False
        self._refused = refused
        if self._refuses_since is None:
            self._refuses_since = now
        return now - self._refuses_since >= self._rule.grow_after

    def _spare(self, now: float, may_shrink: bool) -> int:
        if not may_shrink:
            self._spare_since = None
            return 0
        if self._spare_since is None:
            self._spare_since = now
        if now - self._spare_since < self._rule.shrink_after:
            return 0
        self._spare_since = now
        return -1


@dataclass(eq=False)
class Autoscaler:
    """Changes the workers of models by their demand; ``set_workers`` may raise `ServeError`."""

    models: Iterable[ModelVersion]
    set_workers: Callable[[ModelVersion, int], Awaitable[None]]
    clock: Callable[[], float] = time.monotonic  # that of the jobs in a queue

    def __post_init__(self) -> None:
        self._decisions: WeakKeyDictionary[ModelVersion, ScalingDecision] = WeakKeyDictionary()
        self._changing: set[ModelVersion] = set()

    async def run(self) -> None:
        """Scale the models until cancelled."""
        async with BackgroundTasks() as changes:
            while True:
                for model in list(self.models):
                    if model.settings.autoscale is not None and model not in self._changing:
                        self._scale(model, model.settings.autoscale, changes)
                await asyncio.sleep(_PERIOD_SECONDS)

    def _scale(self, model: ModelVersion, rule: Autoscaling, changes: BackgroundTasks) -> None:
        now, workers = self.clock(), model.workers
        waited = now - model.queue.oldest_arrival if model.queue else 0.0
        refused = model.batcher.deadline_admission.refused
        demand = Demand(workers.alive, workers.ready, workers.busy, waited, refused)
        decision = self._decisions.setdefault(model, ScalingDecision(rule))
        step = decision.step(now, demand, workers.min_workers, workers.max_workers)
        if step:
            late = f"a request has waited {waited:.1f} s, {refused} were refused so far"
            why = late if step > 0 else "one was idle"
            count = demand.workers + step
            logger.info("Model %s %s: %d workers: %s.", model.name, model.version, count, why)
            workers.history.scaled(count, why)
            self._changing.add(model)
            change = changes.start(self._change(model, count, decision))
            change.add_done_callback(lambda _: self._changing.discard(model))

    async def _change(self, model: ModelVersion, count: int, decision: ScalingDecision) -> None:
        try:
            await self.set_workers(model, count)
        except ServeError as error:
            logger.warning("Model %s %s keeps its workers: %s", model.name, model.version, error)
            decision.failed(self.clock())
        else:
            decision.succeeded()
