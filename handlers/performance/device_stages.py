"""A model spread over several devices by its stages, with micro-batches following each other.

    device 0   1 2 3 4
    device 1     1 2 3 4

For weights that stay in the cache of their device, and for room beside them: the model is loaded on
one device and spread from there. Each stage has a thread. Several threads may bring batches
(``overlapStages``), of a single request each or of many: those follow each other through the
stages. A batch that comes alone is cut into pieces, two for every stage, so that with s stages
every device is at work ``2s / (3s - 1)`` of the time (s = 2: 80 %); where others are under way,
into fewer, since they keep the devices busy, too, and every piece has its price.

A model has stages if it is an ``nn.Sequential``, or has an attribute ``stages``, and its result is
that of one after the other. They are split in order, so that the largest share of parameters is
as small as can be.
"""

import functools
import itertools
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from marserve.backend.errors import OptionRefused
from marserve.handlers.performance.optimization import SECTION
from marserve.handlers.performance.pipeline import Pipeline, PipelineStage
from marserve.handlers.performance.precision import Forward
from marserve.handlers.performance.trees import map_tensors, tensors_of

_KEY = f"{SECTION}.device_stages"
_PIECES_PER_STAGE = 2


def stages_of(model: nn.Module) -> list[nn.Module]:
    """List the stages of a model; OptionRefused where it has none."""
    stages = getattr(model, "stages", None)
    if stages is None and isinstance(model, nn.Sequential):
        stages = list(model)
    if stages is None:
        raise OptionRefused(
            f"{_KEY}: {type(model).__name__} is no nn.Sequential and has no stages."
        )
    return list(stages)


def partition_stages(stages: Sequence[nn.Module], parts: int) -> list[nn.Sequential]:
    """Split stages in order into so many parts, none empty, of parameters as equal as can be.

    Raises:
        OptionRefused: There are fewer stages than parts.
    """
    if len(stages) < parts:
        raise OptionRefused(f"{_KEY}: {len(stages)} stages cannot be on {parts} devices.")
    weights = [sum(weight.numel() for weight in stage.parameters()) for stage in stages]
    bounds = _bounds(tuple(weights), parts)
    return [
        nn.Sequential(*stages[begin:end])
        for begin, end in zip((0, *bounds), (*bounds, len(stages)), strict=True)
    ]


@functools.cache
def _bounds(weights: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Where the second part begins, and the others, so that the heaviest part is the lightest."""
    if parts == 1:
        return ()
    last = range(parts - 1, len(weights))

    def with_last(begin: int) -> tuple[int, ...]:
        return (*_bounds(weights[:begin], parts - 1), begin)

    def heaviest(bounds: tuple[int, ...]) -> int:
        edges = (0, *bounds, len(weights))
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(edges))

    return min(map(with_last, last), key=heaviest)


@dataclass
class _Piece:
    """A part of a batch on its way.

    Whether the caller is in inference mode and wants gradients is a setting of its thread; the
    stages' threads take it over.
    """

    value: Any  # what the next stage is called with
    inference: bool
    gradients: bool
    error: BaseException | None = None  # what a stage raised

    def advance(self, forward: Forward, device: torch.device, onward: torch.device) -> None:
        """Run a stage, unless one before it failed, and bring the result to the next device.

        Here, and not where it is needed: a copy waits for all that its source has to do by then, as
        would be the next piece, if this thread went on before the copy is made.
        """
        if self.error is not None:
            return
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        try:
            with (
                on_device,
                torch.inference_mode(self.inference),
                torch.set_grad_enabled(self.gradients),
            ):
                result = forward(_to_device(self.value, device))
                self.value = _to_device(result, onward)
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.error = error


class DeviceStages:
    """A function over batches that runs its stages on several devices at the same time.

    The first stage is called with what the function is called with, each other with the result of
    the one before it. The last one's results are brought to the device ``home``.
    """

    def __init__(self, stages: Sequence[tuple[Forward, torch.device]], home: torch.device) -> None:
        self._pieces = _PIECES_PER_STAGE * len(stages)
        self._under_way = 0
        self._lock = threading.Lock()
        self._pipeline: Pipeline[_Piece] = Pipeline(
            [
                PipelineStage(
                    f"stage-{place}",
                    functools.partial(
                        _Piece.advance, forward=forward, device=device, onward=onward
                    ),
                )
                for place, ((forward, device), onward) in enumerate(
                    zip(stages, [*(device for _, device in stages[1:]), home], strict=True)
                )
            ]
        )

    def __call__(self, batch: Any) -> Any:
        """Run a batch: a tensor, or tensors however nested, each with a row per request."""
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with self._lock:
            self._under_way += 1
            count = max(1, self._pieces // self._under_way)
        try:
            pieces = [_Piece(value, *modes) for value in _split(batch, count)]
            self._pipeline.run(pieces)
        finally:
            with self._lock:
                self._under_way -= 1
        error = next((piece.error for piece in pieces if piece.error is not None), None)
        for piece in pieces:
            piece.error = None  # its traceback knows the piece, too
        if error is not None:
            pieces.clear()
            try:
                raise error
            finally:  # its traceback knows this frame: a circle, with all their memory
                del error
        return _join([piece.value for piece in pieces])

    def shutdown(self) -> None:
        """End the threads, and wait until they have; another batch would start them again."""
        self._pipeline.shutdown()


def _to_device(value: Any, device: torch.device) -> Any:
    # What comes back to the CPU without waiting for it is not there yet.
    is_free = device.type == "cuda"
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=is_free), value)


def _split(batch: Any, pieces: int) -> list[Any]:
    """Cut tensors along their first dimension, into at most so many pieces."""
    rows = len(next(tensors_of(batch)))
    size = -(-rows // pieces)
    return [
        map_tensors(itemgetter(slice(start, start + size)), batch) for start in range(0, rows, size)
    ]


def _join(values: Sequence[Any]) -> Any:
    """Put pieces of one structure together again."""
    columns = zip(*map(tensors_of, values), strict=True)
    return map_tensors(lambda _: torch.cat(next(columns)), values[0])
