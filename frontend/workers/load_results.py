"""The results of a worker's loads, and the trials that its next load runs.

A trial is a batch of samples that a worker runs between loading a model and serving it: to measure
costs, to compare numbers of threads, or to compare answers of batches with those of single
requests.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from marserve.backend.protocol import Loaded, Profiled, Trials
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.workers.batch_validation import BatchValidation
from marserve.frontend.workers.failures import ConnectionLost

_SMALL = 3  # a batch of this size is always compared


class LoadResults:
    """The results of one worker's loads.

    The workers of a model version share ``validation``.
    """

    def __init__(
        self,
        worker: str,
        wanted: Trials,
        batcher: Batcher,
        validation: BatchValidation,
        log: "logging.LoggerAdapter[logging.Logger]",
    ) -> None:
        self.tensors: dict[str, Any] = {}
        self.compiled: dict[str, Any] = {}
        self.warnings: list[str] = []
        self._worker = worker
        self._wanted = wanted
        self._batcher = batcher
        self._validation = validation
        self._log = log
        #: Whether a worker was lost in a trial; it is not repeated.
        self._is_lost = False

    def trials(self, threads: list[int], *, are_threads_known: bool) -> Trials:
        """Return the trials of the next load: those whose results are not known yet."""
        trials, is_lost = replace(self._wanted, threads=threads), self._is_lost
        if is_lost or self._batcher.costs.is_known:
            trials = replace(trials, sizes=[])
        if is_lost or are_threads_known:
            trials = replace(trials, threads=[])
        if self._validation.found or (is_lost and not trials.must_validate):
            trials = replace(trials, validated_sizes=[])
        if self._batcher.batching.is_automatic and self._batcher.costs.is_known:
            trials = replace(trials, validated_sizes=self._measured(trials.validated_sizes))
        return trials

    def _measured(self, sizes: Sequence[int]) -> list[int]:
        """Replace sizes beyond the largest measured one by it: they may need any time or memory."""
        largest = max(_SMALL, *(int(point.size) for point in self._batcher.costs.points))
        return sorted({min(size, largest) for size in sizes})

    def lost(self, loss: ConnectionLost, trials: Trials) -> None:
        """Note that a worker was lost during a load with these trials, perhaps because of them."""
        is_optional = trials.validated_sizes and not trials.must_validate
        if trials.sizes or trials.threads or is_optional:
            self._is_lost = True
            loss.in_trial = True
            loss.cause = f"{loss.cause} It loaded, or tried out batches.".strip()

    def add(self, loaded: Loaded) -> None:
        """Keep the results of a load."""
        self.tensors, self.compiled = loaded.tensors, loaded.compiled
        self.warnings = loaded.warnings
        learn_costs(self._batcher, loaded.profiled)
        learning = self._batcher.learning
        if loaded.profiled.costs and learning.choice is not None:
            self._log.info(
                "%s: batches of up to %d: %s.", self._worker, learning.size, learning.why
            )
        found = loaded.validation or self._lost_validation()
        if failure := self._validation.add(found, self._wanted):
            self._log.warning("%s: validateBatching: %s.", self._worker, failure)

    def _lost_validation(self) -> Mapping[str, Any]:
        wanted = self._wanted
        is_compared = wanted.validated_sizes and not wanted.only_differences
        if not (self._is_lost and is_compared) or self._validation.found:
            return {}
        sizes: list[int] = []
        return {
            "samples": 0,
            "sizes": sizes,
            "largest": 0.0,
            "tolerance": wanted.tolerance,
            "failure": "nothing was compared, since a worker was lost while it tried out batches",
        }


def learn_costs(
    batcher: Batcher, profiled: Profiled, *, known: int = 0, is_complete: bool = True
) -> None:
    """Make a batcher use what a worker has measured: costs of batches, and a limit of their size.

    The batcher has received the first ``known`` costs already. More sizes will be measured unless
    ``is_complete``.
    """
    costs = profiled.costs
    if len(costs) > known or (costs and is_complete):
        new = ((cost.size, cost.seconds) for cost in costs[known:])
        batcher.seed(new, is_complete=is_complete)
    if profiled.too_large:
        batcher.limit_size(profiled.too_large, profiled.note, costs[-1].size if costs else 1)
