"""One call of the handler: makes its data and context of a batch, and a reply of its results.

A result that cannot be sent fails only its own request. An exception, or a wrong number of results,
fails the whole batch.

A batch may be *padded* to a size that the model was compiled for. The additional rows are copies of
the last input, which has the shape and type that the handler expects. The copies have ids that no
client can have chosen, and their results and metrics are dropped.

Successive rows of one request with tensors are a *block*: one `Input`, answered by one prediction.
To copy, describe and answer each row by itself would cost far more than to run it.
"""

import inspect
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from marserve.backend.context import Context, RequestProcessor
from marserve.backend.conversion import Conversion, headers_of, tensor_error
from marserve.backend.errors import (
    FAILED,
    HANDLER_LOG,
    batch_status,
    failure_of,
    poison_of,
    sentence_of,
)
from marserve.backend.metrics import MetricsStore
from marserve.backend.protocol import STREAM_NEXT, Input, Part, Piece, Predict, Prediction, Reply
from marserve.backend.spans import TRACEPARENT, trace_of
from marserve.backend.suspects import suspect_of
from marserve.backend.tensors.answers import AnswerFormat
from marserve.backend.tensors.datatypes import UnusableTensor
from marserve.backend.tensors.outputs import outputs_of
from marserve.backend.tensors.rows import OutputJoiner
from marserve.backend.tensors.stacking import Stack, StackedResults, stacked_results
from marserve.backend.tensors.wire import FORMAT_HEADER

logger = logging.getLogger(HANDLER_LOG)


class RefusedInputs(Exception):
    """Inputs that contradict themselves; ``answers`` has those of their clients, by place."""

    def __init__(self, answers: Mapping[int, Prediction]) -> None:
        super().__init__(answers)
        self.answers = answers


_MAX_CAUSE = 500
_PADDING = f"padding-{os.urandom(8).hex()}-"

Send = Callable[[Piece], None]


class BatchRun:
    """One call of the handler with a batch, whose context gets the requests.

    Args:
        send: Sends pieces of the answers.
        stack: The arrays that the handler gets instead of a list.

    Attributes:
        count: The number of rows without padding.
        data: The argument of the handler.
        rows: The rows in the order of the inputs; the handler may change its list.

    Raises:
        RefusedInputs: The handler can be called with the other inputs only.
    """

    def __init__(
        self,
        conversion: Conversion,
        context: Context,
        batch: Predict,
        send: Send,
        stack: Stack | None = None,
    ) -> None:
        inputs, rows, run_as = batch.inputs, batch.rows, batch.run_as
        self.count = batch.count
        self.context = context
        self._conversion = conversion
        self._send = send
        self._blocks = rows
        self._stack = stack
        self._streams = False
        data: list[dict[str, Any]] = []
        if rows:
            if stack is None:
                for block, count in zip(inputs, rows, strict=True):
                    data += conversion.rows(block, count)
                last, count = inputs[-1], rows[-1]
                data += (conversion.rows(last, count)[-1] for _ in range(self.count, run_as))
            inputs = _row_inputs(inputs, rows)
        if run_as > self.count:
            inputs = padded(inputs, run_as)
        if stack is None and not rows:
            data = [conversion.row(request) for request in inputs]
        self.data: Any = data if stack is None else stack.arrays(run_as)
        self.rows = tuple(data)
        self._formats = _formats_of(inputs, data, conversion.declared)
        for form in self._formats.values():
            form.json_nan = conversion.json_nan
        # Copies, because the handler may change those in the context. Processors that it replaces
        # are used only if there are as many.
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

    @property
    def request_ids(self) -> Iterable[str]:
        """The ids of its requests, which may have several rows."""
        return dict.fromkeys(self._ids[row].partition(".")[0] for row in range(self.count))

    def finished(self, results: Any, started: float, seconds: float | None = None) -> Reply:
        """Return the reply to the batch with the handler's results.

        The handler was called at ``started``, in seconds on the monotonic clock; it took
        ``seconds``, by default the time since then.
        """
        seconds = time.monotonic() - started if seconds is None else seconds
        reply = self._reply(results)
        reply.metrics = drained(self.context)
        reply.handler_started, reply.handler_ms = started, round(seconds * 1000, 3)
        reply.spans = self.context.take_spans()
        return reply

    def _reply(self, results: Any) -> Reply:
        processors: Any = self.context.request_processor
        if _are_processors(processors, len(self._processors)):
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
            return self._block_answers(results)
        del results[self.count :]
        if self.context.stopping_criteria is not None:
            self._apply_stopping_criteria(results)
        return self._block_answers(results) if self._blocks else self._row_answers(results)

    def _row_answers(self, results: Sequence[Any]) -> Reply:
        if self._formats:
            return Reply(predictions=list(map(self._answer, range(self.count), results)))
        answer = self._conversion.prediction
        return Reply(predictions=list(map(answer, range(self.count), results, self._processors)))

    def _failure(self, results: Any) -> Reply | None:
        if not isinstance(results, list | StackedResults):
            wanted = "a list" if self._stack is None else "a list or arrays of all rows"
            if inspect.iscoroutine(results):  # of a function in a decorator, else it is not loaded
                results.close()
                wanted += ": model-config.yaml needs asyncCommunication: true"
            logger.warning("The handler returned %s, not %s.", type(results).__name__, wanted)
            return Reply(503, "Invalid model predict output")
        expected = len(self._processors)
        if len(results) != expected:
            logger.warning(
                "The handler returned %d results for %d requests.", len(results), expected
            )
            return Reply(503, "number of batch response mismatched")
        return None

    def _answer(self, place: int, result: Any) -> Prediction:
        form, processor = self._formats.get(place), self._processors[place]
        if form is None:
            return self._conversion.prediction(place, result, processor)
        return self._conversion.tensors(place, result, processor, form.encode)

    def _block_answers(self, results: list[Any] | StackedResults) -> Reply:
        predictions: list[Prediction] = []
        rows: list[int] = []
        start = 0
        for count in self._blocks or [1] * self.count:
            places = range(start, start + count)
            form = self._formats.get(start)
            processors = (self._processors[place] for place in places)
            if count > 1 and form and all(p.get_response_status_code() == 200 for p in processors):
                predictions.append(self._block_answer(results, start, count, form))
                rows.append(count)
            else:
                predictions += (self._answer(p, _row(results, p, form)) for p in places)
                rows += [1] * count
            start += count
        return Reply(predictions=predictions, rows=tuple(rows) if self._blocks else ())

    def _block_answer(
        self, results: list[Any] | StackedResults, start: int, count: int, form: AnswerFormat
    ) -> Prediction:
        def encode(_result: Any) -> tuple[bytes, int]:
            name = form.output_name
            if isinstance(results, StackedResults):
                return form.write({}, results.outputs(start, count, name))
            found = [outputs_of(result, name) for result in results[start : start + count]]
            joiner = OutputJoiner(self._conversion.dims[1])
            for _, outputs in found:
                joiner.add(outputs, 1)
            return form.write(found[0][0], joiner.joined())

        processor = self._processors[start]
        return self._conversion.tensors(start, None, processor, encode, count)

    def _apply_stopping_criteria(self, results: Sequence[Any]) -> None:
        """Apply the criterion of each request; one that raises ends the answer."""
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
        if code != 200:
            self._send(Piece(code=batch_status(code), message=message or FAILED))
            return
        places = self._places(self._ids if ids is None else ids)
        if not isinstance(results, list | tuple) or len(results) != len(places):
            raise ValueError(
                f"An intermediate response needs a list with a result for each of "
                f"{len(places)} requests"
            )
        piece = Piece()
        for place, result in zip(places, results, strict=True):
            if place < self.count:  # else it is padding
                self._processors[place].add_response_property(STREAM_NEXT, "true")
                prediction = self._answer(place, result)
                prediction.headers = dict(prediction.headers)  # those of the next piece may differ
                piece.predictions.append(prediction)
                piece.places.append(place)
        if piece.places:
            self._streams = True
            self._send(piece)

    def _places(self, ids: Mapping[int, str]) -> list[int]:
        place_of = {id_: place for place, id_ in self._ids.items()}
        try:
            return [place_of[ids[index]] for index in sorted(ids)]
        except KeyError as error:
            raise ValueError(f"No request {error} in the batch") from None


def failure_reply(
    error: BaseException,
    context: Context,
    run: BatchRun | None = None,
    *,
    inputs: Sequence[Input] = (),
    is_sample: bool = False,
) -> Reply:
    """Return the reply to a batch that failed with an exception, and log the exception.

    The traceback has the ids of the requests: those of the inputs, or of the run; and those of the
    traces that are sampled. A sample may not fit the model, so its failure is one line of the log.
    """
    if is_sample:
        last = traceback.extract_tb(error.__traceback__)[-1]
        logger.warning("The sample input failed: %.500r (%s:%s)", error, last.filename, last.lineno)
    else:
        ids = ", ".join([each.id for each in inputs] if run is None else run.request_ids)
        which = f" Request ids: {ids}" if ids else ""
        traces = (trace_of(each.headers) for each in inputs)
        if traced := ", ".join(dict.fromkeys(t.trace_id for t in traces if t and t.sampled)):
            which += f" Trace ids: {traced}"
        logger.warning("Invoking custom service failed.%s", which, exc_info=error)
    code, message = failure_of(error)
    reply = Reply(code, message, metrics=drained(context), poisoned=poison_of(error))
    reply.cause = " ".join(sentence_of(error)[:_MAX_CAUSE].split())
    reply.spans = context.take_spans()
    if run is not None:
        reply.suspect, reply.raised_at = suspect_of(error, run.rows, run.count)
    return reply


def drained(context: Context) -> list[list[Any]]:
    """Take the metrics of the handler; none if it has replaced the store."""
    store: Any = context.metrics
    return store.drain() if isinstance(store, MetricsStore) else []


def padded(inputs: Sequence[Input], rows: int) -> list[Input]:
    """Append copies of the last input up to ``rows``."""
    missing, last = range(len(inputs), rows), inputs[-1]
    if TRACEPARENT in last.headers:  # spans of padding would be those of the last request
        headers = {name: text for name, text in last.headers.items() if name != TRACEPARENT}
        last = Input(last.id, headers, last.parts)
    return [*inputs, *repeats(last, (f"{_PADDING}{place}" for place in missing))]


def repeats(request: Input, ids: Iterable[str]) -> list[Input]:
    """Copy an input under each of these ids."""
    return [
        Input(
            id_,
            request.headers,
            # Bodies too, since handlers may change them.
            [Part(part.name, part.content_type, bytearray(part.body)) for part in request.parts],
        )
        for id_ in ids
    ]


def without_padding(rows: Iterable[list[Any]]) -> list[list[Any]]:
    """Remove padding from rows of `backend.metrics`."""
    kept = []
    for *sample, ids in rows:
        clients = [id_ for id_ in ids if not id_.startswith(_PADDING)]
        if clients or not ids:
            kept.append([*sample, clients])
    return kept


def _row_inputs(inputs: Sequence[Input], rows: Sequence[int]) -> list[Input]:
    """Return an input for each row; of rows in blocks without the body.

    A block has the id of its first row, which ends in the number of the row in its request.
    """
    found: list[Input] = []
    for block, count in zip(inputs, rows, strict=True):
        found.append(block)
        if count > 1:
            own, _, number = block.id.rpartition(".")
            parts = [Part(part.name, part.content_type, b"") for part in block.parts]
            found += (
                Input(f"{own}.{int(number) + place}", block.headers, parts)
                for place in range(1, count)
            )
    return found


def _formats_of(
    inputs: Sequence[Input], data: Sequence[dict[str, Any]], declared: Mapping[str, Any]
) -> dict[int, AnswerFormat]:
    formats: dict[int, AnswerFormat] = {}
    refused: dict[int, Prediction] = {}
    for place, request in enumerate(inputs):
        if FORMAT_HEADER in request.headers:
            if place and request.headers is inputs[place - 1].headers:  # a row of one block
                form = formats.get(place - 1)
            else:
                try:
                    form = AnswerFormat.of(request, data[place] if data else {}, declared)
                except UnusableTensor as error:
                    refused[place] = tensor_error(400, str(error), "BadRequestException")
                    continue
            if form is not None:
                formats[place] = form
    if refused:
        raise RefusedInputs(refused)
    return formats


def _row(results: list[Any] | StackedResults, place: int, form: AnswerFormat | None) -> Any:
    if isinstance(results, list):
        return results[place]
    return results.plain_row(place) if form is None else results.tensor_row(place)


def _are_processors(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(item, RequestProcessor) for item in value)
    )
