"""The service of a loaded model: calls the handler with batches, and returns replies.

The handler is foreign code, so `Any` and blind excepts are allowed here. Its exceptions, except
those that end the process, become replies: a status and a message for clients, and a traceback in
the model log.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

from marserve.backend.batch_run import (
    BatchRun,
    RefusedInputs,
    Send,
    drained,
    failure_reply,
    without_padding,
)
from marserve.backend.context import Caller, Context, current_caller
from marserve.backend.conversion import Conversion, tensor_error
from marserve.backend.input_lengths import InputLengths
from marserve.backend.json_text import KEEP
from marserve.backend.metrics import MetricsStore
from marserve.backend.protocol import EndSequence, Piece, Predict, Prediction, Reply
from marserve.backend.tensors.stacking import Stack, StackedBatch, Stacking

EntryPoint = Callable[[Any, Context], Any]


class Stages(Protocol):
    """A handler whose stages can run separately, such as `BaseHandler`."""

    def begin_overlapping(self) -> None:
        """Prepare for overlapping stages, before the first batch."""

    def enter_stages(self, data: Any, context: Context) -> Iterator[float] | None:
        """Return the steps of a batch, one per stage, which yield the seconds in stages so far.

        None if the entry point has to answer the batch as a whole.
        """

    def leave_stages(self, steps: Any) -> Any:
        """Return the answers of a batch after the steps of all `protocol.STAGES`."""

    def concurrent_inferences(self) -> int:
        """Return how many batches the second stage processes at a time."""


def _discard(_piece: Piece) -> None:
    pass


class Service:
    """A model that is ready to predict.

    Args:
        entry_point: The handler's ``handle(data, context)``.
        context: The only context of this process, passed to the handler with every batch.
        owner: The object or module with the handler's optional methods: ``sample_input``,
            ``input_length`` and ``end_sequence``. They may be set at any time.
        stacking: Makes arrays of all rows of a batch; None for a list with a dict for each.
        tensors: The model's declaration of its tensors.
        stages: Runs the handler's stages separately; None if those of batches do not overlap.

    Attributes:
        poison: Why the process cannot serve any more (`errors`); empty while it can.
    """

    def __init__(
        self,
        entry_point: EntryPoint,
        context: Context,
        *,
        owner: Any = None,
        decode_input: bool = True,
        max_response_bytes: int = 6_553_500,
        stages: Stages | None = None,
        tensors: dict[str, Any] | None = None,
        batch_dims: Sequence[int] = (0, 0),
        json_nan: str = KEEP,
        stacking: Stacking | None = None,
    ) -> None:
        self.stages = stages
        self.tensors = tensors or {}
        self.context = context
        self.poison = ""
        self._runs_samples = False
        self._entry_point = entry_point
        self._owner = owner
        self._input_lengths = InputLengths(partial(self._hook, "input_length"))
        self._conversion = Conversion(
            decode_input, max_response_bytes, batch_dims, json_nan, self.tensors
        )
        self._stacking = stacking

    def predict(self, batch: Predict, send: Send = _discard) -> Reply:
        """Call the handler with a batch: once, or once for each kind of arrays.

        ``send`` is called with pieces of the answers.
        """
        stacked = self._stacked(batch)
        stack = stacked.whole if stacked is not None else None
        if stacked is not None and stack is None:
            reply = self._predict_stacks(stacked, batch, send)
        else:
            reply = self._predict(batch, send, stack)
        self.poison = self.poison or reply.poisoned
        if batch.run_as and batch.run_as > batch.count:
            reply.metrics = without_padding(reply.metrics)
        return reply

    def begin(self, context: Context, batch: Predict, send: Send) -> BatchRun | None:
        """Start a batch that is run in stages; None if the handler cannot be called with all."""
        stacked, stack = self._stacked(batch), None
        if stacked is not None and (stack := stacked.whole) is None:
            return None
        try:
            return BatchRun(self._conversion, context, batch, send, stack)
        except RefusedInputs:
            return None

    def _stacked(self, batch: Predict) -> StackedBatch | None:
        if self._stacking is None or batch.inputs[0].headers.get("describe") == "True":
            return None
        return self._stacking.read(self._conversion.row, batch.inputs, batch.rows)

    def _predict(self, batch: Predict, send: Send, stack: Stack | None) -> Reply:
        context = self.context
        run = None
        try:
            run = BatchRun(self._conversion, context, batch, send, stack)
            began = time.monotonic()
            lengths = self._input_lengths.of(run.rows[: run.count])
            started = time.monotonic()
            results = self._entry_point(run.data, context)
            reply = run.finished(results, started)
            if lengths:
                reply.lengths, reply.length_seconds = tuple(lengths), started - began
            return reply
        except RefusedInputs as error:
            return self._predict_others(batch, error.answers, send)
        except Exception as error:  # noqa: BLE001 - foreign code
            inputs, is_sample = batch.inputs, self._runs_samples
            return failure_reply(error, context, run, inputs=inputs, is_sample=is_sample)
        finally:
            context.on_intermediate = None

    def _predict_others(
        self, batch: Predict, refused: Mapping[int, Prediction], send: Send
    ) -> Reply:
        places = [place for place in range(batch.count) if place not in refused]
        if not places:
            return Reply(predictions=[refused[place] for place in range(batch.count)])
        run_as = batch.run_as if batch.run_as > batch.count else 0
        others = Predict([batch.inputs[place] for place in places], run_as=run_as)
        reply = self._predict(others, partial(_send_at, send, places), None)
        reply.suspect, reply.lengths = -1, ()  # they are by place in the batch
        if reply.code == 200:
            answers = {**refused, **dict(zip(places, reply.predictions, strict=True))}
            reply.predictions = [answers[place] for place in range(batch.count)]
        return reply

    def _predict_stacks(self, stacked: StackedBatch, batch: Predict, send: Send) -> Reply:
        inputs = batch.inputs
        counts = batch.rows or [1] * len(inputs)
        starts = [*accumulate(counts, initial=0)]
        whole = Reply()
        #: By input: predictions, and how many rows each is for.
        answers: dict[int, list[tuple[Prediction, int]]] = {
            place: [(tensor_error(400, why, "BadRequestException"), counts[place])]
            for place, why in stacked.refused.items()
        }
        for stack in stacked.stacks:
            places = [starts[place] + row for place in stack.places for row in range(counts[place])]
            part = Predict(
                [inputs[place] for place in stack.places],
                run_as=batch.run_as if batch.run_as > batch.count else 0,
                rows=[counts[place] for place in stack.places],
            )
            reply = self._predict(part, partial(_send_at, send, places), stack)
            whole.metrics += reply.metrics
            whole.handler_started = whole.handler_started or reply.handler_started
            whole.handler_ms += reply.handler_ms
            reply.spans = whole.spans = (*whole.spans, *reply.spans)
            if reply.code != 200:
                reply.metrics, reply.handler_ms = whole.metrics, whole.handler_ms
                return reply
            left = iter(zip(reply.predictions, reply.rows, strict=True))
            for place in stack.places:
                answers[place] = [next(left)]
                while sum(count for _, count in answers[place]) < counts[place]:
                    answers[place].append(next(left))
        found = [answer for place in range(len(inputs)) for answer in answers[place]]
        whole.predictions = [prediction for prediction, _ in found]
        whole.rows = tuple(count for _, count in found)
        return whole

    async def predict_request(
        self, request: Predict, send: Send = _discard, caller: Caller | None = None
    ) -> Reply:
        """Call a handler that is a coroutine with one request; several calls may run at once."""
        context = self.context
        current_caller.set(caller)
        try:
            context = context.for_request()
            context.caller = caller
            run = BatchRun(self._conversion, context, request, send)
            started = time.monotonic()
            results = self._entry_point(run.data, context)
            if inspect.isawaitable(results):
                results = await results
            return run.finished(results, started)
        except RefusedInputs as error:
            return Reply(predictions=[error.answers[0]])
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, context, inputs=request.inputs)
        finally:
            context.on_intermediate = None  # later pieces, of a task of the handler, are dropped

    def sample_input(self) -> Any:
        """Return the handler's sample input: bytes, str, or a value for JSON; None for none."""
        hook = self._hook("sample_input")
        return None if hook is None else hook()

    @property
    def ends_sequences(self) -> bool:
        """Whether the handler has a method for the end of a sequence."""
        return self._hook("end_sequence") is not None

    @property
    def is_cancellable(self) -> bool:
        """Whether the task of a request may be cancelled: the handler's ``is_cancellable``."""
        return getattr(self._owner, "is_cancellable", False) is True

    @property
    def is_relay(self) -> bool:
        """Whether the handler relays requests to an engine: its ``is_relay``."""
        return getattr(self._owner, "is_relay", False) is True

    def end_sequence(self, end: EndSequence) -> Reply:
        """Call the handler at the end of a sequence."""
        try:
            result = self._call_end_sequence(end)
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError(  # noqa: TRY301 - for the model's log
                    "end_sequence is a coroutine; model-config.yaml needs asyncCommunication"
                )
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, self.context)
        return Reply(metrics=self.take_metrics())

    async def end_sequence_async(self, end: EndSequence) -> Reply:
        """Call a handler that is a coroutine at the end of a sequence."""
        try:
            waiting = self._call_end_sequence(end)
            if inspect.isawaitable(waiting):
                await waiting
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, self.context)
        return Reply(metrics=self.take_metrics())

    def _call_end_sequence(self, end: EndSequence) -> Any:
        hook = self._hook("end_sequence")
        return None if hook is None else hook(end.sequence_id, end.reason)

    def _hook(self, name: str) -> Callable[..., Any] | None:
        hook = getattr(self._owner, name, None)
        return hook if callable(hook) else None

    def take_metrics(self) -> list[list[Any]]:
        """Return the metrics reported since the last reply."""
        return drained(self.context)

    @contextmanager
    def without_traces(self) -> Iterator[None]:
        """Run samples inside: they leave no requests, no metrics and no tracebacks."""
        context = self.context
        store: Any = context.metrics
        earlier = self.take_metrics()  # of the handler's initialisation
        ids = getattr(store, "request_ids", None)
        self._runs_samples = True
        try:
            yield
        finally:
            self._runs_samples = False
            self.take_metrics()
            context.request_ids = context.request_processor = context.stopping_criteria = None
            if isinstance(store, MetricsStore):
                store.request_ids = ids
                store.put_back(earlier)


def _send_at(send: Send, places: Sequence[int], piece: Piece) -> None:
    piece.places = [places[place] for place in piece.places]
    send(piece)
