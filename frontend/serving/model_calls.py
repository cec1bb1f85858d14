"""Calls of other models by handlers (`Context.infer`).

A call is submitted like a client's request, with the priority and the remaining time of the request
on whose behalf it is made. The chain of callers is recorded here; nothing that a client sends
affects it. Models that wait for each other would never answer. So a call is refused

* if its model is in the chain of callers (a → b → a), or the chain is too long;
* if the called model, on behalf of other requests, waits for the caller's model (here a → b, there
  b → a), and has no capacity for one more request: each could wait for the other's workers.
"""

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

from marserve.backend.protocol import Call, Input, Prediction
from marserve.frontend.batching.jobs import Answer, Job, Stream
from marserve.frontend.errors import (
    CyclicCall,
    PayloadTooLarge,
    ServeError,
    ServerBusy,
    TooMuchInFlight,
)
from marserve.frontend.security.usage import RequestMemory, Usage
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.predict_request import PredictRequest, RequestOptions, Ticket
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.whole_answers import whole_answer
from marserve.frontend.tracing.time_lines import NestedLines
from marserve.frontend.workers.calls import CallAnswer, CallModel, OnCallAnswer

logger = logging.getLogger(__name__)

#: Models in a chain of which each waits for the next.
MAX_DEPTH = 10

#: Name and version of a model.
_Key = tuple[str, str]


class ModelCalls:
    """The calls of all handlers.

    ``max_request_bytes`` limits one call, ``max_answer_bytes`` a streamed answer, and ``max_bytes``
    all unanswered calls together with the answers that the callers have not read.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        *,
        max_request_bytes: int,
        max_answer_bytes: int,
        max_bytes: int,
    ) -> None:
        self._registry = registry
        self._max_request_bytes = max_request_bytes
        self._max_answer_bytes = max_answer_bytes
        self._usage = Usage(max_bytes)
        self._last = 0
        #: Job of a call to the models that wait for it, from the first caller on.
        self._callers: dict[object, tuple[_Key, ...]] = {}
        #: Model to the models that it is calling, each with the number of calls.
        self._waiting: defaultdict[_Key, Counter[_Key]] = defaultdict(Counter)

    def by(self, name: str, version: str) -> CallModel:
        """Return the function that calls models on behalf of the handler of this model."""
        return partial(self._call, (name, version))

    def _call(self, key: _Key, caller: Job, call: Call, on_answer: OnCallAnswer) -> "_ModelCall":
        model = self._registry.find(call.model, call.version or None)
        called = model.name, model.version
        callers = (*self._callers.get(caller, ()), key)
        self._check(callers, model, called)
        size = sum(len(part.body) for part in call.parts)
        if size > self._max_request_bytes:
            raise PayloadTooLarge(self._max_request_bytes)
        if caller.nested is None:
            caller.nested = NestedLines()
        memory = RequestMemory(self._usage)
        request = self._request(caller, call, memory)
        deadline = request.arrived + request.options.timeout
        made = _ModelCall(on_answer, deadline, self._max_answer_bytes, memory)
        memory.hold(size)
        try:
            ticket = made.ticket = model.submit(request, made.answered)
        except ServeError:
            memory.end()
            raise
        made.on_end = partial(self._ended, ticket, key, called)
        self._callers[ticket] = callers
        self._waiting[key][called] += 1
        return made

    def _ended(self, ticket: Ticket, key: _Key, called: _Key) -> None:
        del self._callers[ticket]
        waiting = self._waiting[key]
        waiting[called] -= 1
        if not waiting[called]:
            del waiting[called]
        if not waiting:
            del self._waiting[key]

    def _request(self, caller: Job, call: Call, memory: RequestMemory) -> PredictRequest:
        now = time.monotonic()
        # The deadline of an answer in pieces is that of its first piece.
        timeout = math.inf if caller.stream is not None else caller.deadline - now
        if call.timeout is not None and call.timeout < timeout:
            timeout = call.timeout
        self._last += 1
        headers, trace = call.headers, caller.trace
        if trace is not None:
            trace = trace.caused()
            headers = trace.applied_to({**trace.headers, **headers})
        return PredictRequest(
            # A unique id that contains the caller's, for searches in logs.
            Input(f"{caller.input.id}.{self._last}", headers, call.parts),
            memory,
            now,
            bool(call.version),
            RequestOptions(timeout, caller.priority),
            continues=True,
            nested_in=caller.nested,
            trace=trace,
        )

    def _check(self, callers: tuple[_Key, ...], model: ModelVersion, called: _Key) -> None:
        """Raise the error that refuses a call by the last of the ``callers``."""
        if called in callers:
            raise CyclicCall(f"The model would wait for itself: {_formatted(*callers, called)}.")
        if len(callers) >= MAX_DEPTH:
            raise CyclicCall(
                f"At most {MAX_DEPTH} models wait for each other: {_formatted(*callers, called)}."
            )
        if self._waits_for(called, callers[-1]) and not model.has_capacity:
            raise ServerBusy(
                f"Requests of {_formatted(callers[-1])} and {_formatted(called)} wait for each "
                "other's model, which has no capacity for another request."
            )

    def _waits_for(self, waiting: _Key, awaited: _Key) -> bool:
        """Return whether requests of one model wait for another, directly or indirectly."""
        seen, found = {waiting}, [waiting]
        while found:
            after = self._waiting.get(found.pop(), Counter())
            if awaited in after:
                return True
            found.extend(after.keys() - seen)
            seen.update(after)
        return False


class _ModelCall:
    """An unanswered call; it reads a streamed answer as a whole."""

    def __init__(
        self, on_answer: OnCallAnswer, deadline: float, max_bytes: int, memory: RequestMemory
    ) -> None:
        self.ticket: Ticket
        self.on_end: Callable[[], None]
        self._on_answer = on_answer
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._memory = memory
        self._is_over = False
        self._reading: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Cancel the call, without an answer."""
        if self._is_over:
            return
        self._end()
        self._memory.close()
        self.ticket.cancel()
        if self._reading is not None:
            self._reading.cancel()

    def answered(self, answer: Answer) -> None:
        """Pass on the answer of the model."""
        if isinstance(answer, Stream):
            self._reading = asyncio.create_task(self._read(answer))
        else:
            self._pass_on(answer)

    async def _read(self, stream: Stream) -> None:
        try:
            answer: CallAnswer = await whole_answer(
                stream, self._deadline, self._max_bytes, self._memory
            )
        except ServeError as error:
            answer = error
        except Exception:  # a defect; the handler must get an answer
            logger.exception("The answer to a call could not be read.")
            answer = ServeError("The answer could not be read.")
        self._pass_on(answer)

    def _pass_on(self, answer: CallAnswer) -> None:
        if not self._is_over:
            self._end()
            self._memory.end()
            try:
                self._memory.hold(len(answer.body) if isinstance(answer, Prediction) else 0)
            except TooMuchInFlight as error:
                answer = error
            self._on_answer(answer, self._memory.end)

    def _end(self) -> None:
        self._is_over = True
        self.on_end()


def _formatted(*models: _Key) -> str:
    return " -> ".join(" ".join(key) for key in models)
