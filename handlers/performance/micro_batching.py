"""A batch in small pieces, so that one piece is prepared while another is in the model.

In a handler's `initialize`:

    self.handle = MicroBatching(self, micro_batch_size=4)
    self.handle.parallelism = {"preprocess": 2, "inference": 1, "postprocess": 1}

A failure is the caller's: the pieces still on their way are waited for, not worked on, so that
nothing of a failed batch is alive when the next one begins. (A stage's exception killed its thread
in TorchServe, and the batch hung until its timeout.)
"""

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from marserve.backend.context import Context
from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.performance.pipeline import Pipeline, PipelineStage
from marserve.handlers.performance.stage_run import StageLabel
from marserve.handlers.refusals import RefusedInputs

_STAGES = ("preprocess", "inference", "postprocess")


@dataclass
class _Batch:
    """What the pieces of one batch have in common."""

    stage_label: StageLabel
    has_failed: bool = False
    has_refused: bool = False

    def needs(self, stage: str) -> bool:
        """Whether its pieces still have to go through a stage.

        A batch with refused requests is run again without them. Till then only `preprocess` goes
        on, since the other pieces may hold such requests as well.
        """
        return not (self.has_failed or (self.has_refused and stage != _STAGES[0]))


@dataclass
class _Piece:
    """A micro-batch, and what the last stage made of it."""

    batch: _Batch
    index: int
    value: Any
    error: BaseException | None = None


class MicroBatching:
    """A handler's `handle` that runs its stages over micro-batches, side by side.

    Stages run in threads: what one keeps on the handler, another piece's stage may overwrite. The
    context is the batch's; a stage finds the requests of its piece from ``get_micro_batch_idx() *
    micro_batch_size`` on.

    Raises:
        AssertionError: ``micro_batch_size`` is not positive.
    """

    def __init__(self, parent_handler: BaseHandler, micro_batch_size: int = 1) -> None:
        _require(micro_batch_size > 0, "micro_batch_size is at least 1")
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self._local = threading.local()
        self._parallelism = dict.fromkeys(_STAGES, 1)
        self._pipeline = self._new_pipeline()
        parent_handler.stage_pipeline = self._run

    def __call__(self, data: Any, context: Context) -> Any:
        """Answer a batch as `BaseHandler.handle` does: described, explained or profiled too."""
        return BaseHandler.handle(self.handler, data, context)

    @property
    def parallelism(self) -> dict[str, int]:
        """How many threads each stage has; a stage that is not named keeps one."""
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, threads: Mapping[str, int]) -> None:
        for stage, count in threads.items():
            _require(stage in _STAGES, f"a stage is one of {', '.join(_STAGES)}, not {stage!r}")
            _require(
                isinstance(count, int) and count > 0,
                f"a stage has at least one thread, not {count!r}",
            )
        self.shutdown()
        self._parallelism = {**dict.fromkeys(_STAGES, 1), **threads}
        self._pipeline = self._new_pipeline()

    def get_micro_batch_idx(self) -> int:
        """Return the place in the batch of the micro-batch that the calling stage works on."""
        index = getattr(self._local, "index", None)
        if index is None:
            raise RuntimeError("There is a micro-batch only in a stage that MicroBatching runs")
        return int(index)

    def shutdown(self) -> None:
        """End the threads, and wait until they have; another batch would start them again."""
        self._pipeline.shutdown()

    def _new_pipeline(self) -> Pipeline[_Piece]:
        threads = self._parallelism
        return Pipeline(
            [PipelineStage(name, partial(self._advance, name), threads[name]) for name in _STAGES]
        )

    def _run(self, data: Any, stage_label: StageLabel) -> list[Any]:
        """Take a batch through the stages: the handler's `stage_pipeline`."""
        batch = _Batch(stage_label)
        size = self.micro_batch_size
        pieces = [
            _Piece(batch, i, data[start : start + size])
            for i, start in enumerate(range(0, len(data), size))
        ]
        if stage_label is nullcontext:
            self._pipeline.run(pieces)
        else:  # the profiler looks at the caller's thread only
            for stage in _STAGES:
                for piece in pieces:
                    self._advance(stage, piece)
        try:
            self._raise_failure(pieces)
        finally:
            for piece in pieces:
                piece.error = None  # its traceback knows the piece: a circle
        return [result for piece in pieces for result in piece.value]

    def _raise_failure(self, pieces: list[_Piece]) -> None:
        """Raise the first failure; refused requests, of whatever pieces, all in one."""
        refused: dict[int, str] = {}
        for piece in pieces:
            if isinstance(piece.error, RefusedInputs):
                offset = piece.index * self.micro_batch_size
                refused |= {offset + i: why for i, why in piece.error.reasons.items()}
            elif piece.error is not None:
                raise piece.error
        if refused:
            raise RefusedInputs(refused)

    def _advance(self, stage: str, piece: _Piece) -> None:
        if piece.error is not None or not piece.batch.needs(stage):
            return
        self._local.index = piece.index
        try:
            with piece.batch.stage_label(stage):
                piece.value = getattr(self.handler, stage)(piece.value)
        except RefusedInputs as error:
            piece.error = error
            piece.batch.has_refused = True
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            piece.error = error
            piece.batch.has_failed = True
        finally:
            self._local.index = None


def _require(is_so: bool, sentence: str) -> None:
    """Raise AssertionError, TorchServe's type here, whether or not Python runs with -O."""
    if not is_so:
        raise AssertionError(sentence)
