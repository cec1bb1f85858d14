"""Pieces of a batch in stages that work side by side, each in threads of its own.

stage 0   1 2 3 4
stage 1     1 2 3 4
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class PipelineStage(NamedTuple, Generic[T]):
    """What is done with each piece, and how many threads do it."""

    name: str
    work: Callable[[T], None]  # it does not raise: what failed is noted in the piece
    threads: int = 1


class Pipeline(Generic[T]):
    """Takes the pieces of a batch through stages; several threads may bring batches.

    Its threads start with the first batches, and end with the process.
    """

    def __init__(self, stages: Sequence[PipelineStage[T]]) -> None:
        self._stages = stages
        self._pools = self._new_pools()

    def run(self, pieces: Sequence[T]) -> None:
        """Take pieces through all stages; returns when no thread works on any of them.

        No deadline: it takes as long as the stages do, and the frontend ends a worker that hangs.
        """
        finished = threading.Semaphore(0)

        def enter(place: int, piece: T) -> None:
            if place == len(self._stages):
                finished.release()
                return
            done = self._pools[place].submit(self._stages[place].work, piece)
            done.add_done_callback(lambda _: enter(place + 1, piece))

        for piece in pieces:
            enter(0, piece)
        for _ in pieces:
            finished.acquire()

    def shutdown(self) -> None:
        """End the threads, and wait until they have; another batch would start them again."""
        pools, self._pools = self._pools, self._new_pools()
        for pool in pools:
            pool.shutdown()

    def _new_pools(self) -> list[ThreadPoolExecutor]:
        return [ThreadPoolExecutor(stage.threads, stage.name) for stage in self._stages]
