"""`timed`: measures the stages of a handler if model-config.yaml has ``handler: {profile: true}``.

With each batch a stage then reports the gauge ``ts_handler_<function name>`` in milliseconds. On a
CUDA device reading the time waits for the device, which costs throughput.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from marserve.handlers.utils import yaml_config_of

P = ParamSpec("P")
T = TypeVar("T")


def timed(stage: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of a handler, whose ``context`` decides whether it is measured."""

    @functools.wraps(stage)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        handler: Any = args[0]
        context = getattr(handler, "context", None)
        settings = yaml_config_of(context).get("handler") or {}
        if context is None or not settings.get("profile"):
            return stage(*args, **kwargs)
        elapsed_ms = _stopwatch(getattr(handler, "device", None))
        result = stage(*args, **kwargs)
        context.metrics.add_time(f"ts_handler_{stage.__name__}", elapsed_ms())
        return result

    return call


def _stopwatch(device: Any) -> Callable[[], float]:
    """Start the clock of the device; return a function that reads it in milliseconds."""
    if getattr(device, "type", None) != "cuda":
        started = time.perf_counter()
        return lambda: (time.perf_counter() - started) * 1000
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()

    def read() -> float:
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return read
