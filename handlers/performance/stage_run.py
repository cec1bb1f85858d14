"""Runs one batch through the stages of a handler, in whichever thread each of them runs.

`BaseHandler.handle` takes a batch through all stages in one go; a worker whose stages overlap takes
it from thread to thread, one `StageRun.advance` in each. Either way:

* Requests of a batch are independent. If a stage refuses some (`RefusedInputs`), it and those
  before it are run again without them; the context then counts those that are left, until the end.
* A stage finds its own batch's context as ``self.context``, whichever thread it runs in.
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
"""Opens the context a stage runs in: ``nullcontext``, or ``record_function`` under the profiler."""


class Stage(NamedTuple):
    """A stage of a run."""

    name: str  # what a profiler calls it
    run: Callable[[Any, Any], Any]  # takes what the stage before made, and the requests


class StageRun:
    """See the module.

    With ``overlaps`` the stages run in threads of their own. Then requests are refused by the first
    stage alone: running the model again would take it to another thread. ``seconds`` is how long
    the stages took so far, without the time between them.
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
            Exception: Whatever the handler raised; the run is over.
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
        """Run all stages; returns `answers`."""
        with self._limits:
            for _ in self._stages:
                self.advance()
            return self.answers()

    def answers(self) -> Any:
        """Return what the last stage made, with an answer in the place of each refused request."""
        self._limits.close()
        if self._usable is None:
            return self._value
        answers = self._value if self._usable else []
        if not isinstance(answers, list) or len(answers) != len(self._usable):
            return answers  # whoever counts them reports it
        by_place = dict(zip(self._usable, answers, strict=True))
        return [
            by_place[index] if index in by_place else self._refuse(index)
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
        """Begin again without the requests that cannot be used."""
        # Where an envelope made several rows of a request, who is meant is unknown.
        is_known = len(self._all) == len(getattr(self.context, "request_ids", None) or ())
        if self._usable is not None or not is_known or (self._overlaps and self._done > 1):
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
    """A handler's attribute ``context``; while stages overlap, each thread has its own.

    Handlers read it wherever they like, and mean the batch they are at. A thread that has not set
    it, one the handler started by itself, gets what was set last. Until `separate` is called it is
    a plain attribute. An instance keeps the value set last under the attribute's own name.
    """

    _NAME = "context"
    _BY_THREAD = "_context_by_thread"

    @classmethod
    def separate(cls, handler: Any) -> None:
        """Let each thread have a context of its own from now on."""
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
