"""A pipeline of stages that work on different values at the same time, each in its own threads.

stage 0   1 2 3 4
stage 1     1 2 3 4
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class PipelineStage(NamedTuple):
    """A function of the previous stage's result, and the number of threads that call it."""

    name: str
    work: Callable[[Any], Any]
    threads: int = 1


@dataclass
class _Run:
    """The values of one call of `Pipeline.run`, or the results of their last stages."""

    values: list[Any]
    error: BaseException | None = None
    finished: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Pipeline:
    """Takes values through stages; several threads may call `run` at the same time.

    The threads start with the first values and end with the process.
    """

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._stages = stages
        self._pools = self._new_pools()

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Return the last stage's results, in the order of the values.

        After a failure no further stage starts with these values; it is raised when all work on
        them ended. A deadline is not needed: the frontend ends a worker that hangs.
        """
        run = _Run(list(values))
        for index in range(len(run.values)):
            self._pools[0].submit(self._advance, run, index, 0)
        for _ in run.values:
            run.finished.acquire()
        error, run.error = run.error, None  # its traceback refers to the run: no cycle is left
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback refers to this frame, too
        return run.values

    def shutdown(self) -> None:
        """End the threads and wait for them; later values start new ones."""
        pools, self._pools = self._pools, self._new_pools()
        for pool in pools:
            pool.shutdown()

    def _advance(self, run: _Run, index: int, place: int) -> None:
        if run.error is None:
            try:
                run.values[index] = self._stages[place].work(run.values[index])
            except BaseException as error:  # noqa: BLE001 - raised again by `run`
                run.error = error
        if place + 1 < len(self._stages):
            self._pools[place + 1].submit(self._advance, run, index, place + 1)
        else:
            run.finished.release()

    def _new_pools(self) -> list[ThreadPoolExecutor]:
        return [ThreadPoolExecutor(stage.threads, stage.name) for stage in self._stages]
