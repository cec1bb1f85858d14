"""One call of a handler: what it is called with, and what its results become.

A result that cannot be sent speaks only for its own request; an exception, and results that are not
as many as the requests, for the whole batch. A handler may answer in pieces
(`Context.send_intermediate`); what it returns is then the last one. A batch may be padded for a
model of fixed sizes (`backend.padding`), and nothing of the padding leaves.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marserve.backend.context import Context, RequestProcessor
from marserve.backend.conversion import Conversion, headers_of
from marserve.backend.failures import HANDLER_LOG, batch_status, failure_of, poison_of
from marserve.backend.metrics import MetricsStore
from marserve.backend.padding import padded
from marserve.backend.protocol import STREAM_NEXT, Input, Reply

logger = logging.getLogger(HANDLER_LOG)

Send = Callable[[Reply], None]


class BatchRun:
    """One call of the handler: what it is called with, and what its results become.

    Args:
        conversion: Of its inputs and results.
        context: What the handler is called with; it is set to this batch.
        inputs: The batch.
        send: Takes the pieces the handler answers before it returns.
        run_as: How many rows the handler gets, where that is more than there are inputs; what it
            says of the rows behind the inputs goes nowhere.
    """

    def __init__(
        self,
        conversion: Conversion,
        context: Context,
        inputs: Sequence[Input],
        send: Send,
        run_as: int = 0,
    ) -> None:
        self._count = len(inputs)
        if run_as > self._count:
            inputs = padded(inputs, run_as)
        self.context = context
        self.data = [conversion.row(request) for request in inputs]
        self._conversion = conversion
        self._send = send
        self._streams = False
        # Our own: the context is the handler's to play with. What it puts in the place of the
        # processors counts only if it is as many of them.
        self._ids = {place: request.id for place, request in enumerate(inputs)}
        self._processors = [RequestProcessor(headers_of(request)) for request in inputs]
        context.request_ids = dict(self._ids)
        context.request_processor = list(self._processors)
        context.stopping_criteria = None
        context.on_intermediate = self._send_piece

    def finished(self, results: Any, seconds: float) -> Reply:
        """What the handler returned, as the reply to the batch."""
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
            results = list.copy(results)  # a subclass may lie about its length and its items
        if not isinstance(results, list):
            logger.warning("The handler returned %s, not a list.", type(results).__name__)
            return Reply(503, "Invalid model predict output")
        if len(results) != expected:
            logger.warning(
                "The handler returned %d results for %d requests.", len(results), expected
            )
            return Reply(503, "number of batch response mismatched")
        del results[self._count :]
        if self._streams:
            for processor in self._processors:
                processor.add_response_property(STREAM_NEXT, "false")
        if self.context.stopping_criteria is not None:
            self._apply_stopping_criteria(results)
        predict = self._conversion.prediction
        return Reply(predictions=list(map(predict, range(self._count), results, self._processors)))

    def _apply_stopping_criteria(self, results: Sequence[Any]) -> None:
        """Ask for each request whether its answer is complete; an author's mistake ends it."""
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
        """Send what the handler has so far of the requests named by ``ids``, all by default."""
        if code != 200:
            self._send(Reply(batch_status(code), message or "Prediction failed", more=True))
            return
        places = self._places(self._ids if ids is None else ids)
        if not isinstance(results, list | tuple) or len(results) != len(places):
            raise ValueError(
                f"An intermediate response needs a list with a result for each of "
                f"{len(places)} requests"
            )
        placed = zip(places, results, strict=True)
        self._send_results([pair for pair in placed if pair[0] < self._count])

    def _send_results(self, placed: Sequence[tuple[int, Any]]) -> None:
        """Send a piece with a result for each of these places, if it is about any."""
        if not placed:
            return
        self._streams = True
        predictions = []
        for place, result in placed:
            self._processors[place].add_response_property(STREAM_NEXT, "true")
            prediction = self._conversion.prediction(place, result, self._processors[place])
            prediction.headers = dict(prediction.headers)  # those of the next piece may differ
            predictions.append(prediction)
        self._send(Reply(predictions=predictions, places=[place for place, _ in placed], more=True))

    def _places(self, ids: Mapping[int, str]) -> list[int]:
        """Where in the batch the requests stand that the handler speaks of."""
        place_of = {id_: place for place, id_ in self._ids.items()}
        try:
            return [place_of[ids[index]] for index in sorted(ids)]
        except KeyError as error:
            raise ValueError(f"No request {error} in the batch") from None


def _are_processors(value: Any, count: int) -> bool:
    """Whether a handler may have put this in the place of a batch's processors."""
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(item, RequestProcessor) for item in value)
    )


def failure_reply(error: BaseException, context: Context) -> Reply:
    """What the handler raised, or its results made us raise, as the reply to the batch."""
    logger.warning("Invoking custom service failed.", exc_info=error)
    code, message = failure_of(error)
    return Reply(code, message, metrics=drained(context), poisoned=poison_of(error))


def drained(context: Context) -> list[list[Any]]:
    """What the handler reported; nothing where it has put something else in the store's place."""
    store: Any = context.metrics
    return store.drain() if isinstance(store, MetricsStore) else []
