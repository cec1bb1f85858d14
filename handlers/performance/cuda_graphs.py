"""Runs batches of fixed shapes as CUDA graphs: one launch instead of thousands.

A graph uses its own memory, so inputs and outputs are copied. Shapes that did not occur in the
warm-up run without a graph: recording would stop all other work on the device.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from marserve.handlers.performance.precision import Forward
from marserve.handlers.performance.trees import map_tensors, tensors_of

Replay = Callable[[Sequence[torch.Tensor]], Any]
Record = Callable[[Forward, Sequence[torch.Tensor]], Replay]

_WARM_UP_RUNS = 3  # before recording, as torch's documentation of CUDA graphs requires


class CudaGraphs:
    """A function over tensors that is recorded for each shape of the warm-up, and replayed."""

    def __init__(self, forward: Forward, record: Record | None = None) -> None:
        self._forward = forward
        self._record = record or record_graph
        self._replays: dict[str, Replay] = {}
        self._is_warming_up = True
        self._lock = threading.Lock()  # a graph has one set of input buffers

    def end_warm_up(self) -> None:
        """Stop recording."""
        self._is_warming_up = False

    def count(self) -> int:
        """Return the number of recorded graphs."""
        return len(self._replays)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay a graph, record one, or call the function."""
        if torch.is_grad_enabled():  # an explanation; replays have no gradients
            return self._forward(*args, **kwargs)
        call = args, kwargs
        tensors = list(tensors_of(call))
        key = repr(map_tensors(_described, call))
        with self._lock:
            if key not in self._replays and self._is_warming_up:
                self._replays[key] = self._record(_of_tensors(self._forward, call), tensors)
            if key in self._replays:
                return self._replays[key](tensors)
        return self._forward(*args, **kwargs)


def record_graph(forward: Forward, tensors: Sequence[torch.Tensor]) -> Replay:
    """Record one call on the current CUDA device."""
    with torch.inference_mode(False):  # else they are read-only outside of that mode
        inputs = [tensor.clone() for tensor in tensors]
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_RUNS):
            forward(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile: those of MicroBatching do.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = forward(*inputs)

    def replay(tensors: Sequence[torch.Tensor]) -> Any:
        for recorded, tensor in zip(inputs, tensors, strict=True):
            recorded.copy_(tensor)
        graph.replay()
        return map_tensors(torch.clone, output)

    return replay


def _described(tensor: torch.Tensor) -> Any:
    return "tensor", tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _of_tensors(forward: Forward, call: tuple[Any, Any]) -> Forward:
    """Return a function of a call's tensors; the other arguments are those of the call."""

    def run(*tensors: torch.Tensor) -> Any:
        remaining = iter(tensors)
        args, kwargs = map_tensors(lambda _: next(remaining), call)
        return forward(*args, **kwargs)

    return run
