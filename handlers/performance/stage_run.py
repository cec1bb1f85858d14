"""One batch on its way through a handler's stages, wherever each of them runs.

`BaseHandler.handle` takes a batch through all stages in one go; a worker whose stages overlap takes
it from thread to thread, one `advance` in each. Either way it is the same passage:

* Batch-mates are strangers. Where a stage refuses some requests (`RefusedInputs`), it and those
  before it are run again without them; the context then counts those that are left, until the end.
* A stage finds its own batch's context as ``self.context``, whichever thread it runs in.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

from marserve.backend.context import Context
from marserve.handlers.refusals import RefusedInputs

logger = logging.getLogger(__name__)

StageLabel = Callable[[str], AbstractContextManager[Any]]
"""Opens the context a stage runs in: ``nullcontext``, or ``record_function`` under the profiler."""


class Step(NamedTuple):
    """A stage of a passage.

    Attributes:
        name: What a profiler calls it.
        run: From what the step before made (the first: the requests) and the requests, to what the
            next one needs.
    """

    name: str
    run: Callable[[Any, Any], Any]


class Passage:
    """See the module.

    Args:
        handler: Whose stages they are.
        steps: What it goes through.
        data: The requests.
        context: The batch's.
        label: Opens the context that each step runs in.
        overlaps: Whether the steps run in threads of their own. Then requests are refused by the
            first step alone: running the model again would take it to another thread. And all that
            they made stays until the passage is gone (`stage_streams`).

    Attributes:
        seconds: How long the steps took so far, without the time between them.
    """

    def __init__(
        self,
        handler: Any,
        steps: Sequence[Step],
        data: Any,
        context: Context,
        label: StageLabel = nullcontext,
        *,
        overlaps: bool = False,
    ) -> None:
        self.seconds = 0.0
        self.context = context
        self._handler = handler
        self._steps = steps
        self._label = label
        self._overlaps = overlaps
        self._kept: list[Any] = []
        self._all = self._rows = self._value = data
        self._good: list[int] | None = None
        self._reasons: dict[int, str] = {}
        self._done = 0
        self._limits = ExitStack()

    def advance(self) -> None:
        """Run the next step.

        Raises:
            Exception: Whatever the handler raised; the passage is over.
        """
        started = time.perf_counter()
        self._done += 1
        try:
            self._run(self._steps[self._done - 1 : self._done])
        except RefusedInputs as refused:
            self._leave_out(refused)
            self._run(self._steps[: self._done])
        finally:
            self.seconds += time.perf_counter() - started

    def run(self) -> Any:
        """Run all steps; returns `answers`."""
        with self._limits:
            for _ in self._steps:
                self.advance()
            return self.answers()

    def answers(self) -> Any:
        """What the last step made, with an answer in the place of each request that was refused."""
        self._limits.close()
        if self._good is None:
            return self._value
        answers = self._value if self._good else []
        if not isinstance(answers, list) or len(answers) != len(self._good):
            return answers  # whoever counts them reports it
        by_place = dict(zip(self._good, answers, strict=True))
        return [
            by_place[index] if index in by_place else self._refuse(index)
            for index in range(len(self._all))
        ]

    def _run(self, steps: Sequence[Step]) -> None:
        if self._good == []:
            return
        self._handler.context = self.context
        for step in steps:
            if self._overlaps:
                self._kept.append(self._value)
            with self._label(step.name):
                self._value = step.run(self._value, self._rows)

    def _leave_out(self, refused: RefusedInputs) -> None:
        """Begin again without the requests that cannot be used."""
        # Where an envelope made several rows of a request, who is meant is unknown.
        is_known = len(self._all) == len(getattr(self.context, "request_ids", None) or ())
        if self._good is not None or not is_known or (self._overlaps and self._done > 1):
            raise refused
        self._reasons = refused.reasons
        self._good = [index for index in range(len(self._all)) if index not in self._reasons]
        self._rows = self._value = [self._all[index] for index in self._good]
        self._limits.enter_context(self.context.limited_to(self._good))

    def _refuse(self, index: int) -> dict[str, Any]:
        reason, context = self._reasons[index], self.context
        logger.warning("Request %s is refused: %s", context.get_request_id(index), reason)
        context.set_response_status(400, "Bad Request", index)
        context.set_response_content_type(index, "application/json")
        return {"code": 400, "type": "BadRequestException", "message": reason}
