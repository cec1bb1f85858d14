"""A loaded model: a batch of inputs in, as many predictions out.

The handler is foreign code, so this is where `Any` and the blind except are at home. Whatever it
does short of ending the process becomes a reply: a status and a sentence for the clients, a
traceback for the model log. A handler that is a coroutine has one request at a time and a context
of its own for each, because several of them are under way.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from marserve.backend.batch_run import BatchRun, Send, drained, failure_reply
from marserve.backend.context import Context, WarmUp
from marserve.backend.conversion import Conversion
from marserve.backend.metrics import MetricsStore
from marserve.backend.padding import without_padding
from marserve.backend.protocol import Input, Reply

EntryPoint = Callable[[Any, Context], Any]


class StagesOfBatch(Protocol):
    """A batch on its way through the stages of its handler.

    Attributes:
        seconds: How long they took so far.
    """

    seconds: float

    def advance(self) -> None:
        """Run the next stage."""


class Stages(Protocol):
    """A handler whose stages can be run one by one: `marserve.handlers.base_handler`."""

    def begin_overlapping(self) -> None:
        """Called once, before the first batch."""

    def enter_stages(self, data: Any, context: Context) -> Any:
        """Begin with a batch; None for one that the entry point has to answer, all by itself."""

    def leave_stages(self, batch: Any) -> Any:
        """The answers of a batch that has been through all `protocol.STAGES`."""


def _discard(_piece: Reply) -> None:
    """Pieces that nobody asked for."""


def _no_sample() -> None:
    """A handler without a sample input."""


class Service:
    """A model that is ready to predict.

    Args:
        entry_point: The handler's ``handle(data, context)``.
        context: The one context of this process, given to the handler with every batch.
        decode_input: Whether JSON and text parts reach the handler decoded (else as bytearray).
        max_response_bytes: Longest body of one prediction.
        sample_input: Asks the handler for an input such as clients send: bytes, str or what can be
            JSON; None where it has none.
        stages: What takes batches through the handler's stages one by one, where those of several
            batches are to overlap; else None.

    Attributes:
        context, sample_input, stages: As given.
        conversion: Of inputs and results.
        poison: Why the process can serve no more (`failures`), empty while it can.
    """

    def __init__(
        self,
        entry_point: EntryPoint,
        context: Context,
        *,
        decode_input: bool = True,
        max_response_bytes: int = 6_553_500,
        sample_input: Callable[[], Any] = _no_sample,
        stages: Stages | None = None,
    ) -> None:
        self.sample_input = sample_input
        self.stages = stages
        self.context = context
        self.poison = ""
        self._entry_point = entry_point
        self.conversion = Conversion(decode_input, max_response_bytes)

    def predict(self, inputs: Sequence[Input], send: Send = _discard, run_as: int = 0) -> Reply:
        """Run the handler once over the batch.

        Args:
            inputs: The batch.
            send: Takes the pieces that the handler answers meanwhile.
            run_as: How many rows the handler gets, where that is more than there are inputs.
        """
        reply = self._predict(inputs, send, run_as)
        self.poison = self.poison or reply.poisoned
        if run_as > len(inputs):
            reply.metrics = without_padding(reply.metrics)
        return reply

    def _predict(self, inputs: Sequence[Input], send: Send, run_as: int) -> Reply:
        context = self.context
        try:
            run = BatchRun(self.conversion, context, inputs, send, run_as)
            started = time.perf_counter()
            results = self._entry_point(run.data, context)
            return run.finished(results, time.perf_counter() - started)
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, context)
        finally:
            context.on_intermediate = None

    async def predict_request(self, request: Input, send: Send = _discard) -> Reply:
        """Run a handler that is a coroutine over one request, beside others."""
        context = self.context
        try:
            context = context.for_request()
            run = BatchRun(self.conversion, context, [request], send)
            started = time.perf_counter()
            results = self._entry_point(run.data, context)
            if inspect.isawaitable(results):
                results = await results
            return run.finished(results, time.perf_counter() - started)
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, context)
        finally:
            context.on_intermediate = None  # what a task of the handler says later goes nowhere

    def take_metrics(self) -> list[list[Any]]:
        """Return what was reported since the last reply, as rows of `backend.metrics`."""
        return drained(self.context)

    def take_warm_ups(self) -> list[WarmUp]:
        """Return what is to be run before the first batch; from now on there is nothing."""
        taken, self.context.warm_ups = self.context.warm_ups, []
        return taken

    @contextmanager
    def without_traces(self) -> Iterator[None]:
        """Have the batches run inside leave no trace in the context: no requests, no metrics."""
        context = self.context
        store: Any = context.metrics
        earlier = self.take_metrics()  # what the handler reported while it was initialised
        ids = getattr(store, "request_ids", None)
        try:
            yield
        finally:
            self.take_metrics()
            context.request_ids = context.request_processor = context.stopping_criteria = None
            if isinstance(store, MetricsStore):
                store.request_ids = ids
                store.put_back(earlier)
