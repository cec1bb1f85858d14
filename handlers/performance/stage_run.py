"""The stages of a handler for one batch.

`BaseHandler.handle` runs all stages in one call. A worker whose stages overlap runs each step of
`run_stages` in the thread of that stage.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch.profiler import record_function

from marserve.backend.context import Context
from marserve.handlers.refusals import RefusedInputs

logger = logging.getLogger(__name__)

EXPLAIN = "explain"
_BY_THREAD = "_context_by_thread"

Steps = Generator[float, None, Any]


def is_profiling() -> bool:
    """Return whether batches run under torch's profiler."""
    return bool(os.environ.get("ENABLE_TORCH_PROFILER"))


def stage_label() -> Callable[[str], AbstractContextManager[Any]]:
    """Return what a stage runs in, by its name: ``record_function`` under the profiler."""
    return record_function if is_profiling() else nullcontext


def run_stages(
    handler: Any, stages: Sequence[str], data: Any, context: Context, *, overlaps: bool = False
) -> Steps:
    """Run a stage per step, and yield the seconds in stages so far; return the answers.

    If a stage refuses requests, it and the stages before it run again without them, while the
    context counts only the remaining requests. With ``overlaps`` only the first stage can refuse
    requests, since another may be in the wrong thread for the stages before it.
    """
    rows = value = data
    usable: list[int] | None = None
    reasons: dict[int, str] = {}
    seconds = 0.0
    label = stage_label()

    def run(some: Sequence[str], value: Any) -> Any:
        if usable == []:
            return []
        handler.context = context
        for stage in some:
            with label(stage):
                if stage == EXPLAIN:
                    value = handler.explain_handle(value, rows)
                else:
                    value = getattr(handler, stage)(value)
        return value

    with ExitStack() as limits:
        for done, stage in enumerate(stages):
            started = time.perf_counter()
            try:
                value = run([stage], value)
            except RefusedInputs as refused:
                # If an envelope makes several rows of a request, an index does not name a request.
                has_row_each = len(data) == len(getattr(context, "request_ids", None) or ())
                has_requests = has_row_each and hasattr(context, "limited_to")
                if usable is not None or not has_requests or (overlaps and done):
                    raise
                reasons = refused.reasons
                usable = [index for index in range(len(data)) if index not in reasons]
                rows = [data[index] for index in usable]
                limits.enter_context(context.limited_to(usable))
                value = run(stages[: done + 1], rows)
            seconds += time.perf_counter() - started
            yield seconds
    if overlaps:
        report_time(context, seconds)
    if usable is None or not isinstance(value, list) or len(value) != len(usable):
        return value  # the service reports a wrong number of results
    answers = iter(value)
    return [
        _refusal(context, index, reasons[index]) if index in reasons else next(answers)
        for index in range(len(data))
    ]


def finish(steps: Steps) -> Any:
    """Run the remaining steps and return the answers."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def report_time(context: Context, seconds: float) -> None:
    """Report the metric HandlerTime of a batch."""
    if context.metrics is not None:
        # The arguments are TorchServe's: tests of handlers replace the metrics by own objects.
        context.metrics.add_time("HandlerTime", round(seconds * 1000, 2), None, "ms")


def _refusal(context: Context, index: int, reason: str) -> dict[str, Any]:
    logger.warning("Request %s is refused: %s", context.get_request_id(index), reason)
    context.set_response_status(400, "Bad Request", index)
    context.set_response_content_type(index, "application/json")
    return {"code": 400, "type": "BadRequestException", "message": reason}


class BatchContext:
    """A handler's attribute ``context``: a plain attribute, or after `separate` one per thread.

    A thread that has not set it, because the handler started it, reads what was set last.
    """

    @staticmethod
    def separate(handler: Any) -> None:
        """Keep a context per thread from now on."""
        vars(handler).setdefault(_BY_THREAD, threading.local())

    def __get__(self, handler: Any, _owner: type) -> Any:
        if handler is None:
            return self
        values = vars(handler)
        if _BY_THREAD in values:
            return getattr(values[_BY_THREAD], "context", values.get("context"))
        if "context" in values:
            return values["context"]
        raise AttributeError(f"{type(handler).__name__!r} object has no attribute 'context'")

    def __set__(self, handler: Any, value: Any) -> None:
        values = vars(handler)
        values["context"] = value
        if _BY_THREAD in values:
            values[_BY_THREAD].context = value
