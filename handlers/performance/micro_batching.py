"""Micro-batches: pieces of a batch that are in different stages of the handler at the same time.

In a handler's `initialize`:

    self.handle = MicroBatching(self, micro_batch_size=4)
    self.handle.parallelism = {"preprocess": 2, "inference": 1, "postprocess": 1}

A failure is raised when no stage works on the batch any more.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from marserve.backend.context import Context
from marserve.handlers.base_handler import STAGES, BaseHandler
from marserve.handlers.performance.pipeline import Pipeline, PipelineStage
from marserve.handlers.performance.stage_run import is_profiling, stage_label
from marserve.handlers.refusals import RefusedInputs


@dataclass
class _MicroBatch:
    index: int
    value: Any  # the requests, then what the last stage returned
    refused: dict[int, str]  # shared by the batch: index of a request, and the reason


class MicroBatching:
    """A replacement of `BaseHandler.handle` that runs the stages over micro-batches.

    The stages run in different threads. The context is the batch's: the requests of a micro-batch
    begin at ``get_micro_batch_idx() * micro_batch_size``.
    """

    def __init__(
        self,
        parent_handler: BaseHandler,
        micro_batch_size: int = 1,
        parallelism: Mapping[str, int] | None = None,
    ) -> None:
        _require(micro_batch_size > 0, "micro_batch_size is at least 1")
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self._local = threading.local()
        self._parallelism = dict.fromkeys(STAGES, 1)
        self._pipeline = self._new_pipeline()
        self.parallelism = parallelism or {}
        parent_handler.stage_pipeline = self._run

    def __call__(self, data: Any, context: Context) -> Any:
        """Answer a batch as `BaseHandler.handle` does."""
        return BaseHandler.handle(self.handler, data, context)

    @property
    def parallelism(self) -> dict[str, int]:
        """Number of threads of each stage; a stage that is not set keeps its number.

        Raises:
            AssertionError: A stage or number is invalid.
        """
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, threads: Mapping[str, int]) -> None:
        for stage, count in threads.items():
            _require(stage in STAGES, f"a stage is one of {', '.join(STAGES)}, not {stage!r}")
            is_count = isinstance(count, int) and count > 0
            _require(is_count, f"a stage has at least one thread, not {count!r}")
        self.shutdown()
        self._parallelism |= threads
        self._pipeline = self._new_pipeline()

    def get_micro_batch_idx(self) -> int:
        """Return the index of the calling stage's micro-batch; else RuntimeError."""
        index = getattr(self._local, "index", None)
        if index is None:
            raise RuntimeError("There is a micro-batch only in a stage that MicroBatching runs")
        return int(index)

    def shutdown(self) -> None:
        """End the threads and wait for them; a later batch starts new ones."""
        self._pipeline.shutdown()

    def _new_pipeline(self) -> Pipeline:
        threads = self._parallelism
        return Pipeline(
            [PipelineStage(name, partial(self._run_stage, name), threads[name]) for name in STAGES]
        )

    def _run(self, data: Any) -> list[Any]:
        refused: dict[int, str] = {}
        starts = range(0, len(data), self.micro_batch_size)
        pieces = [
            _MicroBatch(index, data[start : start + self.micro_batch_size], refused)
            for index, start in enumerate(starts)
        ]
        if is_profiling():  # only the caller's thread is recorded
            for stage in STAGES:
                with stage_label()(stage):
                    for piece in pieces:
                        self._run_stage(stage, piece)
        else:
            self._pipeline.run(pieces)
        if refused:
            raise RefusedInputs(dict(sorted(refused.items())))
        return [result for piece in pieces for result in piece.value]

    def _run_stage(self, stage: str, piece: _MicroBatch) -> _MicroBatch:
        # The batch will run again without refused requests, so preprocess has to find all of them.
        if piece.refused and stage != STAGES[0]:
            return piece
        self._local.index = piece.index
        try:
            piece.value = getattr(self.handler, stage)(piece.value)
        except RefusedInputs as error:
            first = piece.index * self.micro_batch_size
            piece.refused.update({first + i: reason for i, reason in error.reasons.items()})
        finally:
            self._local.index = None
        return piece


def _require(condition: bool, message: str) -> None:
    """Raise AssertionError, as TorchServe does here, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)
