"""The service of a loaded model: calls the handler with a batch, and makes its results a reply.

The handler is foreign code, so `Any` and blind excepts are allowed here. Whatever it does, short of
ending the process, becomes a reply: a status and a sentence for the clients, and a traceback in the
model log. A result that cannot be sent fails only its own request; an exception, or a wrong number
of results, fails the whole batch.

A handler that is a coroutine is called with one request and a context of its own each time, because
several calls run at once. A handler may answer in pieces (`Context.send_intermediate`); the value
that it returns is then the last piece.

A batch may be *padded* to a size that the model was compiled for. The missing rows are copies of
the last input, which has the shape and type that the handler expects. The copies have ids that no
client can have chosen, and their results and metrics are dropped.
"""

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from marserve.backend.context import Caller, Context, RequestProcessor, current_caller
from marserve.backend.conversion import Conversion, headers_of
from marserve.backend.errors import HANDLER_LOG, batch_status, failure_of, poison_of
from marserve.backend.input_lengths import InputLengths
from marserve.backend.metrics import MetricsStore
from marserve.backend.protocol import (
    STREAM_NEXT,
    EndSequence,
    Input,
    Part,
    Piece,
    Predict,
    Prediction,
    Reply,
)
from marserve.backend.row_blocks import (
    ListedResults,
    RowResults,
    answered_by_blocks,
    row_inputs,
)
from marserve.backend.stacking import (
    Stack,
    StackedResults,
    Stacking,
    predict_stacked,
    stacked_results,
)
from marserve.backend.suspects import suspect_of
from marserve.backend.tensor_requests import FORMAT_HEADER, AnswerFormat

logger = logging.getLogger(HANDLER_LOG)

_PADDING = f"padding-{os.urandom(8).hex()}-"
_ROW_IDS = 5  # where a metric's row names the requests it is about

EntryPoint = Callable[[Any, Context], Any]
Send = Callable[[Piece], None]
OnSequenceEnd = Callable[[str, str], Any]


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


def concurrent_inferences(stages: Any) -> int:
    """How many batches the second stage can work on at a time, each in a thread of its own.

    One, if the handler does not say.
    """
    ask = getattr(stages, "concurrent_inferences", None)
    return int(ask()) if ask is not None else 1


def _discard(_piece: Piece) -> None:
    """Drop a piece of an answer."""


class Service:
    """A model that is ready to predict.

    Args:
        entry_point: The handler's ``handle(data, context)``.
        context: The one context of this process, given to the handler with every batch.
        decode_input, max_response_bytes, batch_dims: See `Conversion`.
        stacking: Makes arrays of all rows of a batch; None for a list with a dict for each.
        sample_input: Returns an input such as clients send (bytes, str, or a value for JSON), or
            None if the handler has none.
        tensors: Those that the handler declares.
        stages: Runs the handler's stages separately, if those of several batches overlap; else
            None.
        end_sequence: Finds what the handler wants to be called with when a sequence is over: its id
            and the reason; None if it does not want to know.
        input_length: Finds what tells the length of a row; None if the handler has nothing to say.

    Attributes:
        poison: Why the process can serve no more (`errors`); empty while it can.
    """

    def __init__(
        self,
        entry_point: EntryPoint,
        context: Context,
        *,
        decode_input: bool = True,
        max_response_bytes: int = 6_553_500,
        sample_input: Callable[[], Any] = lambda: None,
        stages: Stages | None = None,
        tensors: dict[str, Any] | None = None,
        end_sequence: Callable[[], OnSequenceEnd | None] = lambda: None,
        input_length: Callable[[], Callable[[Any], Any] | None] = lambda: None,
        batch_dims: Sequence[int] = (0, 0),
        stacking: Stacking | None = None,
    ) -> None:
        self.sample_input = sample_input
        self.stages = stages
        self.tensors = tensors or {}
        self.context = context
        self.poison = ""
        self._entry_point = entry_point
        self._end_sequence = end_sequence
        self._input_lengths = InputLengths(input_length)
        self.conversion = Conversion(decode_input, max_response_bytes, batch_dims)
        self._stacking = stacking

    def predict(
        self,
        inputs: Sequence[Input],
        send: Send = _discard,
        run_as: int = 0,
        rows: Sequence[int] = (),
    ) -> Reply:
        """Call the handler with the batch: once, or once for each kind of arrays (`stacking`).

        ``send`` is called with intermediate pieces of the answer; ``run_as`` is the number of rows
        after padding, and ``rows`` how many each input is (`Predict`).
        """
        if self._stacking is not None and not _is_description(inputs):
            stacked = self._stacking.read(self.conversion, inputs, rows)
            reply = predict_stacked(self._predict, stacked, inputs, send, run_as, rows)
        else:
            reply = self._predict(inputs, send, run_as, rows)
        self.poison = self.poison or reply.poisoned
        if run_as > (sum(rows) or len(inputs)):
            reply.metrics = without_padding(reply.metrics)
        return reply

    def begin(self, context: Context, batch: Predict, send: Send) -> "BatchRun | None":
        """Begin with a batch that is run in stages; None if it takes several calls (`stacking`)."""
        stack = None
        if self._stacking is not None and not _is_description(batch.inputs):
            stacked = self._stacking.read(self.conversion, batch.inputs, batch.rows)
            if (stack := stacked.whole) is None:
                return None
        return BatchRun(
            self.conversion, context, batch.inputs, send, batch.run_as, batch.rows, stack
        )

    def _predict(
        self,
        inputs: Sequence[Input],
        send: Send,
        run_as: int,
        rows: Sequence[int] = (),
        stack: Stack | None = None,
    ) -> Reply:
        context = self.context
        run = None
        try:
            run = BatchRun(self.conversion, context, inputs, send, run_as, rows, stack)
            began = time.perf_counter()
            lengths = self._input_lengths.of(run.rows[: run.count])
            started = time.perf_counter()
            results = self._entry_point(run.data, context)
            reply = run.finished(results, time.perf_counter() - started)
            if lengths:
                reply.lengths, reply.length_seconds = tuple(lengths), started - began
            return reply
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, context, run)
        finally:
            context.on_intermediate = None

    async def predict_request(
        self, request: Input, send: Send = _discard, caller: Caller | None = None
    ) -> Reply:
        """Call a handler that is a coroutine with one request; several calls may run at once.

        ``caller`` calls other models on behalf of the request.
        """
        context = self.context
        current_caller.set(caller)
        try:
            context = context.for_request()
            context.caller = caller
            run = BatchRun(self.conversion, context, [request], send)
            started = time.perf_counter()
            results = self._entry_point(run.data, context)
            if inspect.isawaitable(results):
                results = await results
            return run.finished(results, time.perf_counter() - started)
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, context)
        finally:
            context.on_intermediate = None  # later pieces, of a task of the handler, are dropped

    @property
    def ends_sequences(self) -> bool:
        """Whether the handler wants to know which sequences are over."""
        return self._end_sequence() is not None

    def end_sequence(self, end: EndSequence) -> Reply:
        """Tell the handler that a sequence is over."""
        try:
            _refuse_coroutine(self._call_end_sequence(end))
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, self.context)
        return Reply(metrics=self.take_metrics())

    async def end_sequence_async(self, end: EndSequence) -> Reply:
        """The same for a handler that is a coroutine; its hook may be one, too."""
        try:
            waiting = self._call_end_sequence(end)
            if inspect.isawaitable(waiting):
                await waiting
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, self.context)
        return Reply(metrics=self.take_metrics())

    def _call_end_sequence(self, end: EndSequence) -> Any:
        hook = self._end_sequence()
        return None if hook is None else hook(end.sequence_id, end.reason)

    def take_metrics(self) -> list[list[Any]]:
        """Return the metrics reported since the last reply, as rows of `backend.metrics`."""
        return drained(self.context)

    @contextmanager
    def without_traces(self) -> Iterator[None]:
        """Restore the context afterwards: batches run inside leave no requests and no metrics."""
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


def _is_description(inputs: Sequence[Input]) -> bool:
    return inputs[0].headers.get("describe") == "True"


def _refuse_coroutine(result: Any) -> None:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("end_sequence is a coroutine; model-config.yaml needs asyncCommunication")


class BatchRun:
    """One call of the handler: prepares its data and context, and turns its results into a reply.

    For ``send``, ``run_as`` and ``rows`` see `Service.predict`; the results of padding are dropped.
    ``stack`` has the arrays that the handler gets in the place of a list.
    """

    def __init__(
        self,
        conversion: Conversion,
        context: Context,
        inputs: Sequence[Input],
        send: Send,
        run_as: int = 0,
        rows: Sequence[int] = (),
        stack: Stack | None = None,
    ) -> None:
        self.count = sum(rows) or len(inputs)
        self._blocks = rows
        self._stack = stack
        self.context = context
        data: list[dict[str, Any]] = []
        if stack is not None:
            inputs = row_inputs(inputs, rows or [1] * len(inputs))
        elif rows:
            for block, count in zip(inputs, rows, strict=True):
                data += conversion.rows(block, count)
            last, count = inputs[-1], rows[-1]
            data += (conversion.rows(last, count)[-1] for _ in range(self.count, run_as))
            inputs = row_inputs(inputs, rows)
        if run_as > self.count:
            inputs = padded(inputs, run_as)
        if stack is None and not rows:
            data = [conversion.row(request) for request in inputs]
        #: What the handler gets.
        self.data: Any = data if stack is None else stack.arrays(run_as)
        #: By place, of the requests in tensors; nearly always empty.
        self._formats: dict[int, AnswerFormat] = {}
        for place, request in enumerate(inputs):
            if FORMAT_HEADER in request.headers:
                if place and request.headers is inputs[place - 1].headers:  # a row of one block
                    form = self._formats.get(place - 1)
                else:
                    form = AnswerFormat.of(request, data[place] if data else {})
                if form is not None:
                    self._formats[place] = form
        #: The rows in the order of the inputs, whatever the handler does to its list.
        self.rows = tuple(data)
        self._conversion = conversion
        self._send = send
        self._streams = False
        # Copies of our own, because the handler may change those in the context. Processors that it
        # puts in their place are used only if there are as many.
        self._ids = {place: request.id for place, request in enumerate(inputs)}
        self._processors = [RequestProcessor(headers_of(request)) for request in inputs]
        context.request_ids = dict(self._ids)
        context.request_processor = list(self._processors)
        context.stopping_criteria = None
        context.on_intermediate = self._send_piece

    @property
    def ids(self) -> set[str]:
        """The ids of its rows."""
        return set(self._ids.values())

    def finished(self, results: Any, seconds: float) -> Reply:
        """Make the reply to the batch from what the handler returned."""
        reply = self._checked(results)
        reply.metrics = drained(self.context)
        reply.handler_ms = round(seconds * 1000, 3)
        return reply

    def _checked(self, results: Any) -> Reply:
        expected = len(self._processors)
        processors: Any = self.context.request_processor
        if _are_processors(processors, expected):
            self._processors = processors
        if isinstance(results, list):
            results = list.copy(results)  # a subclass may override its length and items
        elif self._stack is not None:
            results = stacked_results(results, self._conversion.dims[1]) or results
        if failure := self._failure(results):
            return failure
        if self._streams:
            for processor in self._processors:
                processor.add_response_property(STREAM_NEXT, "false")
        if isinstance(results, StackedResults):
            return self._by_blocks(results)
        del results[self.count :]
        if self.context.stopping_criteria is not None:
            self._apply_stopping_criteria(results)
        if self._blocks:
            return self._by_blocks(ListedResults(results))
        return Reply(
            predictions=list(map(self._predictor, range(self.count), results, self._processors))
        )

    def _failure(self, results: Any) -> Reply | None:
        """The reply to results that are not one for each row; None if they are."""
        if not isinstance(results, list | StackedResults):
            wanted = "a list" if self._stack is None else "a list or arrays of all rows"
            logger.warning("The handler returned %s, not %s.", type(results).__name__, wanted)
            return Reply(503, "Invalid model predict output")
        if len(results) != len(self._processors):
            logger.warning(
                "The handler returned %d results for %d requests.",
                len(results),
                len(self._processors),
            )
            return Reply(503, "number of batch response mismatched")
        return None

    def _by_blocks(self, results: RowResults) -> Reply:
        blocks = self._blocks or [1] * self.count
        return answered_by_blocks(
            self._conversion, results, blocks, self._formats, self._processors
        )

    @property
    def _predictor(self) -> Callable[[int, Any, RequestProcessor], Prediction]:
        """Makes the answer of a place, its result and its processor."""
        plain, tensors, formats = (
            self._conversion.prediction,
            self._conversion.tensors,
            self._formats,
        )
        if not formats:
            return plain

        def predict(place: int, result: Any, processor: RequestProcessor) -> Prediction:
            if place in formats:
                return tensors(place, result, processor, formats[place])
            return plain(place, result, processor)

        return predict

    def _apply_stopping_criteria(self, results: Sequence[Any]) -> None:
        """Call each request's stopping criterion; one that raises ends the answer."""
        criteria = self.context.stopping_criteria or ()
        for processor, result, criterion in zip(self._processors, results, criteria, strict=False):
            if criterion is None:
                continue
            try:
                stops = criterion(result)
            except Exception:  # foreign code
                logger.warning("A stopping criterion failed.", exc_info=True)
                stops = True
            if stops is not None:
                processor.add_response_property(STREAM_NEXT, "false" if stops else "true")

    def _send_piece(
        self, results: Sequence[Any], ids: Mapping[int, str] | None, message: str, code: int
    ) -> None:
        """Send pieces of the answers to the requests in ``ids``, by default all."""
        if code != 200:
            self._send(Piece(code=batch_status(code), message=message or "Prediction failed"))
            return
        places = self._places(self._ids if ids is None else ids)
        if not isinstance(results, list | tuple) or len(results) != len(places):
            raise ValueError(
                f"An intermediate response needs a list with a result for each of "
                f"{len(places)} requests"
            )
        placed = zip(places, results, strict=True)
        self._send_results([pair for pair in placed if pair[0] < self.count])

    def _send_results(self, placed: Sequence[tuple[int, Any]]) -> None:
        """Send a piece with a result for each of these places, if there are any."""
        if not placed:
            return
        self._streams = True
        predictions = []
        for place, result in placed:
            self._processors[place].add_response_property(STREAM_NEXT, "true")
            prediction = self._predictor(place, result, self._processors[place])
            prediction.headers = dict(prediction.headers)  # those of the next piece may differ
            predictions.append(prediction)
        self._send(Piece(predictions, [place for place, _ in placed]))

    def _places(self, ids: Mapping[int, str]) -> list[int]:
        """The places in the batch of the requests with these ids."""
        place_of = {id_: place for place, id_ in self._ids.items()}
        try:
            return [place_of[ids[index]] for index in sorted(ids)]
        except KeyError as error:
            raise ValueError(f"No request {error} in the batch") from None


def _are_processors(value: Any, count: int) -> bool:
    """Whether a value is a list of as many processors."""
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(item, RequestProcessor) for item in value)
    )


def failure_reply(error: BaseException, context: Context, run: BatchRun | None = None) -> Reply:
    """Make the reply to a batch whose handler raised, or whose results could not be converted."""
    logger.warning("Invoking custom service failed.", exc_info=error)
    code, message = failure_of(error)
    reply = Reply(code, message, metrics=drained(context), poisoned=poison_of(error))
    if run is not None:
        reply.suspect, reply.raised_at = suspect_of(error, run.rows, run.count)
    return reply


def drained(context: Context) -> list[list[Any]]:
    """Take the metrics of the handler; none if it has replaced the store with something else."""
    store: Any = context.metrics
    return store.drain() if isinstance(store, MetricsStore) else []


def padded(inputs: Sequence[Input], rows: int) -> list[Input]:
    """Append copies of the last input until there are ``rows`` in all."""
    missing = range(len(inputs), rows)
    return [*inputs, *repeats(inputs[-1], (f"{_PADDING}{place}" for place in missing))]


def repeats(request: Input, ids: Iterable[str]) -> list[Input]:
    """Copy an input under each of these ids; bodies too, since handlers may change theirs."""
    return [
        Input(
            id_,
            request.headers,
            [Part(part.name, part.content_type, bytearray(part.body)) for part in request.parts],
        )
        for id_ in ids
    ]


def without_padding(rows: Iterable[list[Any]]) -> list[list[Any]]:
    """Remove padding from rows of `backend.metrics`; rows about padding only are dropped."""
    kept = []
    for row in rows:
        ids = [id_ for id_ in row[_ROW_IDS] if not id_.startswith(_PADDING)]
        if ids or not row[_ROW_IDS]:
            kept.append([*row[:_ROW_IDS], ids])
    return kept
