"""Whether batches of a model version change its answers (`validateBatching`).

Batches of samples are compared with single requests when a worker loads the model, or here, while
it serves, if changed settings leave the batch size to the server. Until then batches have one row.
A request may wait for one run of samples.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from marserve.backend.protocol import Compare, Trials
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.options import Batching
from marserve.frontend.workers.dispatch.batched import Batched, DispatchStrategy, samples_run

logger = logging.getLogger(__name__)

#: Why batches have one row until they have been compared.
PENDING = "batches are compared with single requests first, until then batch_size is 1"
# The time of a run, for which a request waits: several times, if others are ahead of it.
_LONGEST_SECONDS = 0.25
_SHARE_OF_GOAL = 0.25
# How often it is looked whether a worker is ready.
_POLL_SECONDS = 0.5
# A worker that is lost in a run may be lost because of it.
_MAX_LOST = 2


class BatchValidation:
    """The comparisons of one model version; ``workers`` returns its ready workers.

    Attributes:
        found: A `profiling.validation.Validation`; empty if nothing was compared.
    """

    def __init__(
        self, name: str, batcher: Batcher, workers: Callable[[], Iterable[DispatchStrategy]]
    ) -> None:
        self.found: dict[str, Any] = {}
        self._name = name
        self._batcher = batcher
        self._workers = workers
        #: The sizes that were compared, or could not be.
        self._tried: set[int] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def failure(self) -> str:
        """Why batches may change answers; empty if they do not, or nothing was compared."""
        return PENDING if self._task is not None else str(self.found.get("failure", ""))

    def add(self, found: Mapping[str, Any], trials: Trials) -> str:
        """Note the result of trials, empty if nothing could be compared; return the failure."""
        self._tried.update(trials.validated_sizes)
        failure: str = found.get("failure", "")
        if failure and trials.only_differences:
            self._batcher.distrust(failure)
            failure = f"{failure}; so batch_size stays 1 unless a number is set"
        if found and not self.found.get("failure"):
            sizes = {*found["sizes"], *self.found.get("sizes", ())}
            self.found = {**found, "sizes": sorted(sizes), "failure": failure}
        return failure

    def begin(self, trials: Trials, batching: Batching) -> None:
        """Compare the sizes that were not tried, from now on, before the model forms batches."""
        self.stop()
        sizes = [size for size in trials.validated_sizes if size not in self._tried]
        if sizes and not self._batcher.learning.distrusted:
            self._batcher.distrust(PENDING)
            longest = min(_LONGEST_SECONDS, _SHARE_OF_GOAL * batching.goal)
            message = Compare(
                sizes,
                list(batching.compiled_sizes),
                trials.validation_seconds,
                longest,
                trials.tolerance,
            )
            self._task = asyncio.create_task(self._run(message, trials), name="batch validation")

    def stop(self) -> None:
        """End the comparison. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            self._trust()

    async def ended(self, seconds: float) -> None:
        """Wait until nothing is pending, for some seconds at most, and not without a worker."""
        if self._task is not None and self._find_worker() is not None:
            await asyncio.wait({self._task}, timeout=seconds)

    def _trust(self) -> None:
        self._task = None
        if self._batcher.learning.distrusted == PENDING:
            self._batcher.distrust("")

    async def _run(self, message: Compare, trials: Trials) -> None:
        found: Mapping[str, Any] | None = None
        for _ in range(_MAX_LOST):
            found = await self._compare(await self._able_worker(), message)
            if found is not None:
                break
        failure = self.add(found or {}, trials)
        if failure:
            logger.warning("%s: validateBatching: %s.", self._name, failure)
        self._trust()

    async def _compare(self, worker: Batched, message: Compare) -> Mapping[str, Any] | None:
        """Return the result, empty if nothing could be compared; None if the worker is lost."""
        while True:
            compared = await samples_run(worker, message, self._batcher.costs.mean(1))
            if compared is None or compared.poisoned:
                return None
            if (found := compared.validation) is not None:
                return found if found["sizes"] or found["failure"] else {}
            message = Compare([], [], 0.0, 0.0, 0.0)

    async def _able_worker(self) -> Batched:
        # No deadline: `stop` ends it.
        while True:
            if (worker := self._find_worker()) is not None:
                return worker
            await asyncio.sleep(_POLL_SECONDS)

    def _find_worker(self) -> Batched | None:
        able = [each for each in self._workers() if isinstance(each, Batched) and each.is_accepting]
        waiting = self._batcher.workers.waiting
        return next((each for each in able if each in waiting), able[0] if able else None)
