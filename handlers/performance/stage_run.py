"""One batch in the stages of a handler.

`BaseHandler.handle` runs all stages in one call. A worker whose stages overlap calls
`StageRun.advance` once in the thread of each stage. If a stage refuses requests (`RefusedInputs`),
it and the stages before it run again without them; the context then counts the remaining requests.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

from marserve.backend.context import Context
from marserve.handlers.refusals import RefusedInputs

logger = logging.getLogger(__name__)

StageLabel = Callable[[str], AbstractContextManager[Any]]
"""Returns what a stage runs in: ``nullcontext``, or ``record_function`` under the profiler."""


class Stage(NamedTuple):
    """A stage by the name that a profiler shows; ``run(result of the last stage, requests)``."""

    name: str
    run: Callable[[Any, Any], Any]


class StageRun:
    """A batch and its results so far; ``seconds`` is the time in stages, without pauses.

    With ``overlaps`` stages run in threads of their own. Then only the first stage can refuse
    requests: to run the model again would take it to another thread.
    """

    def __init__(
        self,
        handler: Any,
        stages: Sequence[Stage],
        data: Any,
        context: Context,
        label: StageLabel = nullcontext,
        *,
        overlaps: bool = False,
    ) -> None:
        self.seconds = 0.0
        self.context = context
        self._handler = handler
        self._stages = stages
        self._label = label
        self._overlaps = overlaps
        self._all = self._rows = self._value = data
        self._usable: list[int] | None = None
        self._reasons: dict[int, str] = {}
        self._done = 0
        self._limits = ExitStack()

    def advance(self) -> None:
        """Run the next stage.

        Raises:
            Exception: What the handler raised; no further stage can run.
        """
        started = time.perf_counter()
        self._done += 1
        try:
            self._run(self._stages[self._done - 1 : self._done])
        except RefusedInputs as refused:
            self._leave_out(refused)
            self._run(self._stages[: self._done])
        finally:
            self.seconds += time.perf_counter() - started

    def run(self) -> Any:
        """Run all stages and return the answers."""
        with self._limits:
            for _ in self._stages:
                self.advance()
            return self.answers()

    def answers(self) -> Any:
        """Return the result of the last stage, with an error in the place of refused requests."""
        self._limits.close()
        if self._usable is None:
            return self._value
        answers = self._value if self._usable else []
        if not isinstance(answers, list) or len(answers) != len(self._usable):
            return answers  # the service reports it
        by_index = dict(zip(self._usable, answers, strict=True))
        return [
            by_index[index] if index in by_index else self._refuse(index)
            for index in range(len(self._all))
        ]

    def _run(self, stages: Sequence[Stage]) -> None:
        if self._usable == []:
            return
        self._handler.context = self.context
        for stage in stages:
            with self._label(stage.name):
                self._value = stage.run(self._value, self._rows)

    def _leave_out(self, refused: RefusedInputs) -> None:
        # If an envelope makes several rows of a request, an index does not name a request.
        has_row_each = len(self._all) == len(getattr(self.context, "request_ids", None) or ())
        if self._usable is not None or not has_row_each or (self._overlaps and self._done > 1):
            raise refused
        self._reasons = refused.reasons
        self._usable = [index for index in range(len(self._all)) if index not in self._reasons]
        self._rows = self._value = [self._all[index] for index in self._usable]
        self._limits.enter_context(self.context.limited_to(self._usable))

    def _refuse(self, index: int) -> dict[str, Any]:
        reason, context = self._reasons[index], self.context
        logger.warning("Request %s is refused: %s", context.get_request_id(index), reason)
        context.set_response_status(400, "Bad Request", index)
        context.set_response_content_type(index, "application/json")
        return {"code": 400, "type": "BadRequestException", "message": reason}


class BatchContext:
    """A handler's attribute ``context``: a plain attribute, or after `separate` one per thread.

    A thread that has not set it, because the handler started it, reads what was set last. The
    instance's ``__dict__`` has that under the name of the attribute.
    """

    _NAME = "context"
    _BY_THREAD = "_context_by_thread"

    @classmethod
    def separate(cls, handler: Any) -> None:
        """Keep a context per thread from now on."""
        handler.__dict__.setdefault(cls._BY_THREAD, threading.local())

    def __get__(self, handler: Any, _owner: type) -> Any:
        if handler is None:
            return self
        values = handler.__dict__
        if self._BY_THREAD in values:
            return getattr(values[self._BY_THREAD], self._NAME, values.get(self._NAME))
        try:
            return values[self._NAME]
        except KeyError:
            message = f"{type(handler).__name__!r} object has no attribute {self._NAME!r}"
            raise AttributeError(message) from None

    def __set__(self, handler: Any, value: Any) -> None:
        values = handler.__dict__
        values[self._NAME] = value
        if self._BY_THREAD in values:
            setattr(values[self._BY_THREAD], self._NAME, value)
